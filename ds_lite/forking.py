"""All ranks of a job for the price of one import of torch (§9.10).

    launcher --starts--> fork server --imports, then forks--> rank 0, rank 1, ...

Importing torch takes a processor two seconds, for every rank anew; a fork of a process that has done it takes
none. The server only waits: it tells the launcher how each rank ended, and ends them all when told to.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

CAN_FORK = sys.platform == "linux"  # elsewhere a fork of a process that has loaded torch may not be used


class ForkedRank:
    """One rank, to the launcher what a `Popen` is: poll, kill, wait, returncode."""

    def __init__(self, server: _Server, rank: int) -> None:
        self._server, self._rank = server, rank

    @property
    def returncode(self) -> int | None:
        return self._server.codes[self._rank]

    def poll(self) -> int | None:
        self._server.read()
        return self.returncode

    def kill(self) -> None:
        """End it and all others: a job ends as a whole."""
        self._server.end()

    def wait(self) -> int | None:
        self._server.end()
        return self.returncode


def fork_ranks(
    command: Sequence[str], environment: Mapping[str, str], num_ranks: int, pass_fds: Sequence[int]
) -> list[ForkedRank]:
    """Start `command` with one more word, a file descriptor for `serve`, which it has to call."""
    server = _Server(command, environment, num_ranks, pass_fds)
    return [ForkedRank(server, rank) for rank in range(num_ranks)]


class _Server:
    """The launcher's end: reads how ranks ended, lines of rank and exit code."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], num_ranks: int, pass_fds: Sequence[int]
    ) -> None:
        self.codes: list[int | None] = [None] * num_ranks
        self._ends, theirs = os.pipe()
        self._text, self._is_over = b"", False
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs)], env=environment, pass_fds=[*pass_fds, theirs]
            )
        finally:
            os.close(theirs)

    def read(self) -> None:
        """Take in what the server has said; when it has gone, so have all ranks."""
        while not self._is_over and select.select([self._ends], [], [], 0)[0]:
            said = os.read(self._ends, 4096)
            if not said:
                self.end()
                code = self._process.returncode or 1
                self.codes = [code if old is None else old for old in self.codes]
                return
            *lines, self._text = (self._text + said).split(b"\n")
            for line in lines:
                rank, code = map(int, line.split())
                self.codes[rank] = code

    def end(self) -> None:
        """No rank is left, nor the server."""
        if self._is_over:
            return
        self._process.terminate()
        self._process.wait()
        os.close(self._ends)
        self._is_over = True


def serve(tell: int, num_ranks: int, run: Callable[[int], None]) -> None:
    """In the server: fork `num_ranks` processes that call `run(rank)`, and report to `tell` how they end.

    A rank returns from here when `run` has; the server when all ranks have ended. SIGTERM ends all of them.
    """
    ranks: dict[int, int] = {}

    def end_all(*_: object) -> None:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_all)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until all are on the list
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            os.close(tell)
            return run(rank)
        ranks[pid] = rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    while ranks:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # it stays a child until it is off the list
        assert ended is not None
        rank = ranks.pop(ended.si_pid)
        _, status = os.waitpid(ended.si_pid, 0)
        with suppress(BrokenPipeError):  # the launcher has gone; the ranks notice, too
            os.write(tell, f"{rank} {os.waitstatus_to_exitcode(status)}\n".encode())
