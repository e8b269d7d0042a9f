"""The machine: processor, memory, threads and GPUs, and the devices that the self-tests run on."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import torch

from lqrl.doctor.report import Row, Section, WrongResultError, attempt
from lqrl.quant.native_build import cpu_model
from lqrl.quant.triton_use import TENSOR_CORES_FP8, TENSOR_CORES_INT8

_GIB = 2**30


def machine_section() -> Section:
    """Processor, memory, threads, then a row a GPU."""
    gpus = [attempt(f"cuda:{index}", _gpu, index) for index in range(torch.cuda.device_count())]
    rows = (attempt("cpu", _cpu), attempt("memory", _memory), attempt("threads", _threads))
    return Section("machine", (*rows, *(gpus or [_no_gpu()])))


def devices() -> list[torch.device]:
    """The CPU, and the first GPU of each kind."""
    kinds: dict[tuple[str, int, int], int] = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        kinds.setdefault((properties.name, properties.major, properties.minor), index)
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in kinds.values())]


def device_name(device: torch.device) -> str:
    """The device as titles have it."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def dotted(capability: tuple[int, int]) -> str:
    """``(8, 9)`` as ``8.9``."""
    return ".".join(map(str, capability))


def _cpu(name: str) -> Row:
    model = cpu_model().rpartition(":")[2].strip() or "unknown model"
    where = f"{platform.system()} {platform.machine()}"
    capability = torch.backends.cpu.get_cpu_capability()
    facts = {"model": model, "system": platform.system(), "machine": platform.machine(), "torch": capability}
    return Row(name, "ok", f"{model}, {where}; torch uses {capability}", "", facts)


def _memory(name: str) -> Row:
    if os.name != "posix":
        return Row(name, "ok", f"not measured on {platform.system()}")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {"total_bytes": total}
    free = ""
    if Path("/proc/meminfo").is_file():
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        facts["available_bytes"] = int(lines["MemAvailable"].split()[0]) * 1024
        free = f", {facts['available_bytes'] / _GIB:.1f} GiB available"
    return Row(name, "ok", f"{total / _GIB:.1f} GiB{free}", "", facts)


def _threads(name: str) -> Row:
    threads, cpus = torch.get_num_threads(), os.cpu_count()
    variable = os.environ.get("OMP_NUM_THREADS")
    why = f" (OMP_NUM_THREADS={variable})" if variable else ""
    return Row(name, "ok", f"torch uses {threads}{why}, {cpus} CPUs", "", {"torch": threads, "cpus": cpus})


def _gpu(name: str, index: int) -> Row:
    properties = torch.cuda.get_device_properties(index)
    if torch.ones(64, device=name).sum().item() != 64:
        raise WrongResultError("a sum of 64 ones is not 64")
    capability = (properties.major, properties.minor)
    facts = {"name": properties.name, "capability": capability, "memory_bytes": properties.total_memory}
    lacks = [(TENSOR_CORES_INT8, "our Triton kernels"), (TENSOR_CORES_FP8, "fp8 tensor cores")]
    remedy = "; ".join(f"{what}: capability {dotted(least)}" for least, what in lacks if capability < least)
    memory = f"{properties.total_memory / _GIB:.1f} GiB"
    return Row(name, "ok", f"{properties.name}, capability {dotted(capability)}, {memory}", remedy, facts)


def _no_gpu() -> Row:
    """Why torch sees no GPU."""
    gpu = f"an NVIDIA GPU of capability {dotted(TENSOR_CORES_INT8)} ({dotted(TENSOR_CORES_FP8)} for fp8)"
    if torch.version.cuda is None:
        build = "torch with CUDA (Linux: pip install --force-reinstall torch; https://pytorch.org)"
        remedy = build if shutil.which("nvidia-smi") else f"{gpu}, {build}"
        return Row("gpu", "missing", f"torch {torch.__version__} is built without CUDA", remedy)
    if shutil.which("nvidia-smi"):
        built = f"torch {torch.__version__} needs CUDA {torch.version.cuda}"
        return Row("gpu", "missing", f"{built}, and sees no GPU beside nvidia-smi", "a newer NVIDIA driver")
    return Row("gpu", "missing", "torch sees no GPU", gpu)
