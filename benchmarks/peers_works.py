"""How each peer is called. Needs torch and that peer alone, so that the peers' environment can import it.

Every function takes a `Request`, imports its peer, and returns what is timed: a call that loads, and returns by name
CPU tensors that own their memory. What a peer can leave out (other tensors, other rows) it leaves out; where it hands
over whole tensors or memory that it uses again, the part that is wanted is cloned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PARTS = 4  # a slice is the first of so many, as torch chunks a dimension
PREFIX = "mtp."  # of a draft's names
READER_THREADS = 4  # of torch's reader, which by default has one
STREAM_BATCH = 8  # tensors that unifiedefficientloader loads at a time; by default one

Loaded = dict[str, torch.Tensor]
Load = Callable[[], Loaded]


@dataclass(frozen=True, slots=True)
class Request:
    """What one process does. `work` is a function, as module.function of this package.

    `take`: "all"; "rows" or "columns", the first of `PARTS` slices of each tensor that has the dimension; "draft", the
    tensors under `PREFIX`. With `digests`, a path, the process writes there what it was given instead of measuring.
    """

    work: str
    files: tuple[str, ...]
    take: str = "all"
    capacity_bytes: int = 0
    digests: str = ""

    @property
    def folder(self) -> str:
        return str(Path(self.files[0]).parent)

    @property
    def dim(self) -> int | None:
        """The dimension that is cut."""
        return {"rows": 0, "columns": 1}.get(self.take)

    def index_of(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Of the part that is wanted of a tensor: whole where it lacks the dimension, or has size 1 there."""
        if self.dim is None or self.dim >= len(shape) or shape[self.dim] == 1:
            return ()
        return (*(slice(None),) * self.dim, slice(0, -(-shape[self.dim] // PARTS)))

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of that part."""
        return tensor[self.index_of(tuple(tensor.shape))]

    def wants(self, name: str) -> bool:
        return self.take != "draft" or name.startswith(PREFIX)


# safetensors


def safe_open_cloned(request: Request) -> Load:
    """`safe_open`, whose tensors are views of the mapped file; of slices `get_slice`. Each is cloned."""
    return _safe_open(request, "mmap")


def safe_open_pread(request: Request) -> Load:
    """The same with the back end that reads: what it returns owns its memory already."""
    return _safe_open(request, "pread")


def _safe_open(request: Request, backend: str) -> Load:
    from safetensors import safe_open

    def load() -> Loaded:
        kept = {}
        for path in request.files:
            with safe_open(path, framework="pt", device="cpu", backend=backend) as file:
                for name in filter(request.wants, file.offset_keys()):
                    if request.dim is None:
                        tensor = file.get_tensor(name)
                    else:
                        part = file.get_slice(name)
                        index = request.index_of(tuple(part.get_shape()))
                        tensor = part[index] if index else file.get_tensor(name)
                    kept[name] = tensor.clone() if backend == "mmap" else tensor
        return kept

    return load


def load_file_cloned(request: Request) -> Load:
    """`load_file`, whose tensors are views of the mapped file, each cloned."""
    return _load_file(request, "mmap")


def load_file_pread(request: Request) -> Load:
    """`load_file` with the back end that reads all of every file."""
    return _load_file(request, "pread")


def _load_file(request: Request, backend: str) -> Load:
    from safetensors.torch import load_file

    def load() -> Loaded:
        kept = {}
        for path in request.files:
            for name, tensor in load_file(path, backend=backend).items():
                if request.wants(name):
                    kept[name] = tensor.clone() if backend == "mmap" else tensor
        return kept

    return load


def reference(request: Request) -> Load:
    """What is right: whole tensors of `safe_open`, cut by torch."""
    from safetensors import safe_open

    def load() -> Loaded:
        kept = {}
        for path in request.files:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in filter(request.wants, file.offset_keys()):
                    kept[name] = request.part_of(file.get_tensor(name)).clone()
        return kept

    return load


# Others


def fastsafetensors(request: Request) -> Load:
    """Its parallel loader, whose tensors are copies; a draft by its filter. Of slices it lends views to be cloned."""
    wants = request.wants if request.take == "draft" else None
    return _fastsafetensors(request, tensor_filter=wants)


def fastsafetensors_whole(request: Request) -> Load:
    """The same without its filter: every tensor of every file is read."""
    return _fastsafetensors(request)


def _fastsafetensors(request: Request, **options: Any) -> Load:
    from fastsafetensors import ParallelLoader

    sliced = request.dim is not None
    options |= {"borrowed_tensors": True, "accumulate_resident": False} if sliced else {}

    def load() -> Loaded:
        kept = {}
        files = list(request.files)
        loader = ParallelLoader(None, files, device="cpu", nogds=True, use_tqdm_on_load=False, **options)
        try:
            for name, tensor in loader.iterate_weights():
                if request.wants(name):
                    kept[name] = request.part_of(tensor).clone() if sliced else tensor
        finally:
            loader.close()
        return kept

    return load


def fastsafetensors_buffers(request: Request) -> Load:
    """Its plain loader: a buffer for each file, of which tensors are views that keep all of it. Slices are cloned."""
    from fastsafetensors import SafeTensorsFileLoader

    def load() -> Loaded:
        kept = {}
        loader = SafeTensorsFileLoader(None, "cpu", nogds=True)
        try:
            loader.add_filenames({0: list(request.files)})
            buffers = loader.copy_files_to_device()
            for name in loader.get_keys():
                tensor = buffers.get_tensor(name)
                kept[name] = tensor if request.dim is None else request.part_of(tensor).clone()
            buffers.close()
        finally:
            loader.close()
        return kept

    return load


def runai(request: Request) -> Load:
    """Its streamer; a draft by names, which safetensors tells. Of slices it lends views to be cloned."""
    from safetensors import safe_open

    def names() -> list[str]:
        found: list[str] = []
        for path in request.files:
            with safe_open(path, framework="pt") as file:
                found += filter(request.wants, file.offset_keys())
        return found

    return _runai(request, names if request.take == "draft" else None)


def runai_whole(request: Request) -> Load:
    """The same without names: every tensor of every file is read."""
    return _runai(request, None)


def _runai(request: Request, names: Callable[[], list[str]] | None) -> Load:
    from runai_model_streamer import SafetensorsStreamer

    owned = request.dim is None

    def load() -> Loaded:
        kept = {}
        with SafetensorsStreamer() as streamer:
            chosen = names() if names else None
            streamer.stream_files(list(request.files), device="cpu", owned=owned, tensor_names=chosen)
            for name, tensor in streamer.get_tensors():
                if request.wants(name):
                    kept[name] = tensor if owned else request.part_of(tensor).clone()
        return kept

    return load


def unified(request: Request) -> Load:
    """unifiedefficientloader's stream of the tensors that are wanted, file by file."""
    return _unified(request, request.wants)


def unified_whole(request: Request) -> Load:
    """The same for every tensor of every file."""
    return _unified(request, lambda _: True)


def _unified(request: Request, reads: Callable[[str], bool]) -> Load:
    from unifiedefficientloader import UnifiedSafetensorsLoader

    def load() -> Loaded:
        kept = {}
        for path in request.files:
            with UnifiedSafetensorsLoader(path, low_memory=True) as loader:
                names = list(filter(reads, loader.keys()))
                for batch in loader.async_stream(names, batch_size=STREAM_BATCH):
                    for name, tensor in batch:
                        if request.wants(name):
                            kept[name] = tensor if request.dim is None else request.part_of(tensor).clone()
        return kept

    return load


def torch_reader(request: Request) -> Load:
    """torch.distributed.checkpoint's Hugging Face reader into fresh tensors; slices as the first shard of DTensors.

    The group that those need is torch's own stand-in, which sends nothing.
    """
    import torch.distributed
    from torch.distributed.checkpoint import hf_storage, metadata, state_dict_loader
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh: DeviceMesh | None = None
    if request.dim is not None and not torch.distributed.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", rank=0, world_size=PARTS, store=FakeStore())
    if request.dim is not None:
        mesh = init_device_mesh("cpu", (PARTS,))

    def load() -> Loaded:
        reader = hf_storage.HuggingFaceStorageReader(request.folder, thread_count=READER_THREADS)
        wanted: dict[str, Any] = {}
        kept = {}
        for name, entry in filter(
            lambda item: request.wants(item[0]), reader.read_metadata().state_dict_metadata.items()
        ):
            assert isinstance(entry, metadata.TensorStorageMetadata)
            whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            kept[name] = torch.empty(request.part_of(whole).shape, dtype=whole.dtype)
            wanted[name] = kept[name]
            if mesh is not None and kept[name].shape != whole.shape:
                assert request.dim is not None
                sides: Any = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
                wanted[name] = DTensor.from_local(kept[name], mesh, [Shard(request.dim)], **sides)
        state_dict_loader.load(wanted, storage_reader=reader, no_dist=True)
        return kept

    return load
