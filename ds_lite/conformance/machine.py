"""The machine a report is about: what it has, and the versions of what runs on it; not whose it is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import ds_lite
from ds_lite.conformance import in_a_job


def facts(backend: str, *, host_name: bool = False) -> dict[str, str]:
    """What is known about this machine, by what it is called in a report; what `backend` came to on it.

    Units: in the text. What is not here reads "none", what cannot be found out "unknown".
    """
    said = {"host": platform.node()} if host_name else {}
    said["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    said["CPU"] = _cpu()
    said["cores"] = _cores()
    said["memory"] = _memory()
    if (ranks := in_a_job.ranks()) > 1:
        said["job"] = f"{ranks} processes on {in_a_job.nodes()} nodes; this is the node of rank 0"
    return {**said, **_gpus(), "backend": _backend(backend), **_versions()}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists() and (model := re.search(r"model name\s*:\s*(.+)", info.read_text(errors="replace"))):
        return model.group(1).strip()
    return platform.processor() or "unknown"


def _cores() -> str:
    total = os.cpu_count() or 0
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return str(total) if usable == total else f"{usable} of {total}"


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{size / 2**30:.0f} GiB"


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"GPUs": "none", "driver": "none", "CUDA": torch.version.cuda or "none", "NCCL": "none"}
    names = [
        f"{one.name}, {one.total_memory / 2**30:.0f} GiB"
        for one in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "GPUs": "; ".join(kinds),
        "driver": _driver(),
        "CUDA": torch.version.cuda or "unknown",
        "NCCL": nccl,
    }


def _backend(asked: str) -> str:
    """By the rule of the worlds: NCCL where each rank has a GPU of its own, staged where they share."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto" and gpus:
        return f"NCCL up to {gpus} rank{'s' if gpus > 1 else ''} a node, staged through gloo beyond"
    return {"nccl": "NCCL", "staged": "staged: GPU tensors by way of the host, through gloo"}.get(
        asked, "gloo"
    )


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False).stdout.split()
    return answer[0] if answer else "unknown"


def _versions() -> dict[str, str]:
    import torch

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "none"

    return {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "ds_lite": ds_lite.__version__,
        **{name: version(name.lower()) for name in ("transformers", "DeepSpeed")},
    }
