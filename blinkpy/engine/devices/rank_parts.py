"""One model on several GPUs: checks machine and options, and loads each GPU's part."""

from collections.abc import Sequence

import torch

from blinkpy.config import Config
from blinkpy.engine.devices.device_contract import Setup
from blinkpy.engine.devices.gpu_parts import GpuOptions, GpuParts, load_gpu, shapes_of
from blinkpy.engine.devices.rank_loops import on_gpu, open_peer_access
from blinkpy.engine.link.pair_memory import HOST
from blinkpy.kernels.all_reduce import Peers, connect_peers
from blinkpy.models.description.split import Share
from blinkpy.transport.verbs import RdmaOptions

OPTION = "--tensor-parallel-size"


def ranks_problem(config: Config, gpus: Sequence[int]) -> str:
    """Why these GPUs can't serve one model together; "" if they can."""
    ranks = len(gpus)
    if config.engine.control == "host":
        return f"{OPTION} {ranks} needs --control gpu: the host runs the steps of one GPU only"
    if (queue_memory := config.extension(RdmaOptions).queue_memory) != HOST:
        return f"{OPTION} {ranks} needs --queue-memory {HOST}, not {queue_memory}"
    if config.scheduler.speculative != "off":
        return f"{OPTION} {ranks} needs --speculative off: drafts were not tested on several GPUs"
    if config.scheduler.step_groups > 1:
        return f"{OPTION} {ranks} needs --step-groups 1: cut steps were not tested on several GPUs"
    names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    if max(gpus) >= len(names):
        return gpus_problem(names, max(gpus) + 1, [])
    access = [(a, b) for a in gpus for b in gpus if a != b]
    lacking = [pair for pair in access if not torch.cuda.can_device_access_peer(*pair)]
    return gpus_problem([names[gpu] for gpu in gpus], ranks, lacking)


def gpus_problem(names: Sequence[str], ranks: int, lacking: Sequence[tuple[int, int]]) -> str:
    """Why this machine's GPUs can't share a model; "" if they can.

    names: names of the GPUs.
    lacking: pairs (a, b) of GPUs; a can't access b's memory.
    """
    if len(names) < ranks:
        return f"{OPTION} {ranks} needs {ranks} GPUs, but CUDA shows {len(names)} (CUDA_VISIBLE_DEVICES selects them)"
    for number, name in enumerate(names[:ranks]):
        if name != names[0]:
            return f"{OPTION} {ranks} needs equal GPUs, but GPU 0 is {names[0]} and GPU {number} is {name}"
    if lacking:
        one, other = lacking[0]
        return f"{OPTION} {ranks} needs peer access between GPUs, but GPU {one} can't access the memory of GPU {other}"
    return ""


def load_ranks(setup: Setup, how: GpuOptions, gpus: Sequence[int]) -> list[tuple[GpuParts, Peers]]:
    """Load each rank's part of the model to its GPU, and connect them. Raises ConfigError, CudaError."""
    open_peer_access(gpus)
    ranks = len(gpus)
    shares, (_, shapes, _) = [Share(rank, ranks) for rank in range(ranks)], shapes_of(setup)
    tokens, rows = max(shape.tokens for shape in shapes), max(shape.rows for shape in shapes)
    head = [share.head(setup.model.vocab_size) for share in shares]
    devices = [torch.device("cuda", gpu) for gpu in gpus]
    peers = connect_peers(devices, how.dtype, tokens, setup.model.hidden_size, rows, head)
    found = list[tuple[GpuParts, Peers]]()
    for share, own, gpu in zip(shares, peers, gpus, strict=True):
        with on_gpu(gpu):
            found.append((load_gpu(setup, how, share, own), own))
    return found
