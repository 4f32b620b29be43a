"""How much communication Domino hides between two processes: a second witness beside domino.py (§9.15).

    sudo python labs/bench/domino_veth.py [--quick] [--json table.json]    # five minutes on two quiet cores

Two gloo processes, each in its network namespace and on its core, joined by a veth pair that tc's tbf holds
to a rate: the link takes the wanted share of the classic step. Needs Linux, root and iproute2.
A round runs each model on the link, then without sums, then its all-reduces one by one on an idle link: the
communication time. Exposed is (step - step without) over it, hidden the rest; "processor" is the part of it
in which sums use the core themselves. The slower rank counts; medians of the less disturbed half of rounds.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from ctypes import CDLL
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from bystanders import Reading, foreign_cores
from domino import BATCH, HEADS, LAYERS, RANKS, TOKENS, WIDTH, make, waiting_at_once
from torch import distributed as dist
from torch.multiprocessing import start_processes

from ds_lite import comm
from ds_lite.tensor_parallel.pending import Pending

SHARES = (0.2, 0.3, 0.45)  # of communication in the classic step
PACKET = 65000  # bytes; tbf would cut larger ones on the core that computes, and its burst is one of these


class Rank:
    """One of the two processes, at its end of the link."""

    def __init__(self, device: str) -> None:
        self.device, self.me, group = device, comm.new_group_of_one(), dist.group.WORLD
        torch.manual_seed(1)
        self.x, self.target = torch.randn(2, TOKENS, BATCH, WIDTH).unbind()
        self.zeros = torch.zeros(self.x.numel())
        parts = {"classic": 1, "intra": 2, "inter": 2}
        self.models = {name: make(group, parts=n, intra=name == "intra") for name, n in parts.items()}
        self.pids: list[int] = [0] * RANKS
        dist.all_gather_object(self.pids, os.getpid())
        self.messages = {name: self.check(name) for name in self.models}

    def check(self, name: str) -> list[int]:
        """How many elements each sum of a step has; and whether the step is right."""
        with comm.record() as ledger:
            result = self.step(name)
        torch.testing.assert_close(result, self.step("classic"), rtol=1e-4, atol=1e-8)
        assert not torch.isclose(self.alone(name)[0], result[0], rtol=1e-2), f"{name}: sums change nothing"
        return [ledger.total().payload // ledger.total().calls // 4] * ledger.total().calls  # float32

    def step(self, name: str) -> tuple[torch.Tensor, Any]:
        """One forward and backward: the loss, and the gradient of the input."""
        x = self.x.clone().requires_grad_()
        with waiting_at_once() if name == "classic" else nullcontext():
            loss = (self.models[name](x) * self.target).mean()  # a norm's mean square would be 1
            loss.backward()
        self.models[name].zero_grad(set_to_none=True)
        return loss.detach(), x.grad

    def alone(self, name: str) -> tuple[torch.Tensor, Any]:
        """The step if there is nobody to talk to: a sum is over when it starts."""
        start, me = Pending.start, self.me
        with mock.patch.object(Pending, "start", lambda self, key, x, group: start(self, key, x, me)):
            return self.step(name)

    def sums(self, name: str) -> None:
        for size in self.messages[name]:
            dist.all_reduce(self.zeros[:size])

    def round(self, first: int) -> tuple[float, dict[str, list[float]]]:
        """Cores that others took; of each model seconds of step, alone, sums, and the sums' processor."""
        before, names, times = Reading.now(self.pids), list(self.models), torch.zeros(3, 4).double()
        for i in (first % 3, (first + 1) % 3, (first + 2) % 3):
            for j, part in enumerate((self.step, self.alone, self.sums)):
                dist.barrier()
                wall, processor = perf_counter(), process_time()
                part(names[i])
                times[i, j], times[i, 3] = perf_counter() - wall, process_time() - processor
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return foreign_cores(before, Reading.now(self.pids)), dict(zip(names, times.tolist()))

    def measure(self, rounds: int) -> dict[str, dict[str, float]]:
        without, table = min(self.round(i)[1]["classic"][1] for i in range(3)), {}
        for share in SHARES:
            bits = 32 * sum(self.messages["classic"]) / (share / (1 - share) * without)  # per second
            tbf = f"tc qdisc replace dev {self.device} root tbf rate {bits:.0f}bit burst 65kb latency 1s"
            subprocess.run(tbf.split(), check=True)
            rows = sorted((self.round(i) for i in range(rounds)), key=lambda row: row[0])
            table[f"{share:.0%}"] = found = summary(rows[: (rounds + 1) // 2])
            for name, value in found.items() if dist.get_rank() == 0 else ():
                print(f"link of {share:>4.0%}   {name:<24}{value:>8.3f}", flush=True)
        return table


def summary(rounds: list[tuple[float, dict[str, list[float]]]]) -> dict[str, float]:
    classic, intra, inter = ([row[name] for _, row in rounds] for name in rounds[0][1])
    found = {
        "cores of others": median(cores for cores, _ in rounds),
        "share of communication": median(sums / step for step, _, sums, _ in classic),
        "classic / intra": median(a[0] / b[0] for a, b in zip(classic, intra)),
        "classic / inter": median(a[0] / b[0] for a, b in zip(classic, inter)),
        "processor": median(processor / sums for _, _, sums, processor in inter),
    }
    for name, rows in zip(rounds[0][1], (classic, intra, inter)):
        found[f"hidden by {name}"] = median(1 - (step - alone) / sums for step, alone, sums, _ in rows)
    return found


def work(rank: int, devices: tuple[str, str], folder: str, rounds: int) -> None:
    assert CDLL(None).setns(os.open(f"/run/netns/{devices[rank]}", os.O_RDONLY), 0) == 0, "no namespace"
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")  # here; bbr would probe for a rate
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    os.environ["GLOO_SOCKET_IFNAME"] = devices[rank]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(Rank(devices[rank]).measure(rounds)))


def run(rounds: int) -> Any:
    """Both processes on a link of their own, of which nothing stays."""
    a, b = devices = f"dsl{os.getpid()}v0", f"dsl{os.getpid()}v1"  # the namespaces' names, too
    commands = f"""netns add {a}
        netns add {b}
        link add {a} netns {a} type veth peer name {b} netns {b}
        -n {a} address add 10.0.0.1/30 dev {a}
        -n {b} address add 10.0.0.2/30 dev {b}
        -n {a} link set {a} mtu {PACKET} up
        -n {b} link set {b} mtu {PACKET} up"""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        try:
            for command in commands.splitlines():
                subprocess.run(["ip", *command.split()], check=True)
            start_processes(work, (devices, folder, rounds), RANKS, daemon=True, start_method="spawn")
            return json.loads(Path(f"{folder}/0.json").read_text())
        finally:  # a namespace takes its end of the cable along, at the latest when its process ends
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for device in devices:
                subprocess.run(["ip", "netns", "delete", device], stderr=subprocess.DEVNULL)


def main(
    quick: Annotated[bool, typer.Option(help="fewer rounds")] = False,
    path: Annotated[Path | None, typer.Option("--json", help="write the table there")] = None,
) -> None:
    if not (shutil.which("ip") and shutil.which("tc")) or os.geteuid() or len(os.sched_getaffinity(0)) == 1:
        typer.echo("domino_veth.py needs Linux, root, iproute2 and two cores; domino.py does not", err=True)
        raise typer.Exit(2)
    os.environ["OMP_NUM_THREADS"] = "1"  # before the processes read it
    sizes = f"tp={RANKS} layers={LAYERS} H={WIDTH} N={HEADS} T={TOKENS} B={BATCH} torch {torch.__version__}"
    table = {"sizes": sizes} | run(rounds=4 if quick else 14)
    if path is not None:
        path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
