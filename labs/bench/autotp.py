"""What DeepSpeed's AutoTP and ours do with the same models: same, wrong, or refused (§9.13).

    python labs/bench/autotp.py --deepspeed-python OTHER/bin/python --json docs/data/autotp.json    # ten
    minutes

Each family of `tests/families.py`, tiny, in float32, over two ranks, is trained for three steps of SGD by
DeepSpeed, by ds_lite and by one process. "same": all three losses within 1e-4 of one process's; "wrong": a
loss that differs; "refused": it ended with an error, whose last line is kept. Every family has a job of its
own, because some end the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS, LEARNING_RATE, CLOSE = 2, 3, 0.1, 1e-4
LIMIT_S = 120.0


def main(
    deepspeed_python: Annotated[Path, typer.Option(help="A Python that has DeepSpeed and transformers.")],
    families: Annotated[list[str] | None, typer.Argument(help="Only these families.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the table to this file.")] = None,
) -> None:
    """Compare the two on all families, and print one line for each."""
    sys.path.insert(0, str(ROOT / "tests"))
    from families import FAMILIES

    rows: dict[str, dict[str, Any]] = {}
    for name in families or FAMILIES:
        truth = one_process(name)
        rows[name] = {
            "class": FAMILIES[name].model,
            "ds_lite": verdict(job(Path(sys.executable), "ds_lite", name), truth),
            "deepspeed": verdict(job(deepspeed_python, "deepspeed", name), truth),
        }
        told = {peer: rows[name][peer] for peer in ("ds_lite", "deepspeed")}
        print(f"{name:<24}" + "   ".join(f"{peer} {_short(one)}" for peer, one in told.items()), flush=True)
    counts = {
        peer: {kind: sum(row[peer]["verdict"] == kind for row in rows.values()) for kind in KINDS}
        for peer in ("ds_lite", "deepspeed")
    }
    print(counts)
    if json_file is not None:
        table = {
            "made_by": "python labs/bench/autotp.py --deepspeed-python PYTHON --json docs/data/autotp.json",
            "what": f"losses of {STEPS} SGD steps over {RANKS} ranks in float32 against one process",
            "versions": {name: version(name) for name in ("torch", "transformers")} | {"deepspeed": "0.19.8"},
            "counts": counts,
            "families": rows,
        }
        json_file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


KINDS = ("same", "wrong", "refused")


def _short(one: dict[str, Any]) -> str:
    return one["verdict"] if one["verdict"] == "same" else f"{one['verdict']} ({one['why'][:90]})"


def one_process(name: str) -> list[float]:
    """The losses that both are compared with."""
    import torch
    from families import FAMILIES, loss_of

    model = FAMILIES[name].make(*heads_for(name), dtype=torch.float32)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), []
    for _ in range(STEPS):
        loss = loss_of(model(**FAMILIES[name].inputs(dtype=torch.float32)).logits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def heads_for(name: str) -> tuple[int, int]:
    """Query heads, and key and value heads where a family has fewer; CodeGen packs them in blocks of four."""
    return (8, 8) if name == "codegen" else (6, 3)


def job(python: Path, peer: str, name: str) -> list[float] | str:
    """The losses of a job of two processes, or the last line of what it said before it ended."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "losses.json"
        command = [str(python), "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        command += ["--standalone", str(Path(__file__)), "--worker", peer, name, str(out)]
        quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": str(ROOT)}
        deepspeed = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **quiet, **deepspeed},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return f"did not end within {LIMIT_S:.0f} s"
        if out.exists():
            return json.loads(out.read_text())
        errors = [line for line in done.stderr.splitlines() if "Error" in line and "ChildFailed" not in line]
        return errors[0].split("]: ")[-1].strip() if errors else f"exit status {done.returncode}"


def verdict(got: list[float] | str, truth: list[float]) -> dict[str, Any]:
    if isinstance(got, str):
        return {"verdict": "refused", "why": got[:200]}
    off = max(abs(a - b) / abs(b) for a, b in zip(got, truth, strict=True))
    if off < CLOSE:
        return {"verdict": "same"}
    return {
        "verdict": "wrong",
        "why": f"losses {[round(x, 4) for x in got]}, one process {[round(x, 4) for x in truth]}",
    }


def work(peer: str, name: str, out: str) -> None:
    """One process of a job."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    from families import FAMILIES, loss_of

    if peer == "deepspeed":
        import deepspeed as library
    else:
        import ds_lite as library
    library.init_distributed("gloo") if peer == "deepspeed" else library.init_distributed()
    family = FAMILIES[name]
    model = family.make(*heads_for(name), dtype=torch.float32)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "tensor_parallel": {"autotp_size": RANKS},
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,
    }
    engine = library.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    engine.module.eval()
    losses = []
    for _ in range(STEPS):
        loss = loss_of(engine(**family.inputs(dtype=torch.float32)).logits)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(losses))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:5])
    else:
        typer.run(main)
