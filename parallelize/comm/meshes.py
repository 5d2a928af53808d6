"""Device meshes: built from named sizes, and described by a `MeshSpec`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelize.base.errors import MeshError, Problem
from parallelize.base.mesh import AXES, MeshSpec
from parallelize.comm.uncaught_errors import publish_uncaught_errors


def build_mesh(device_type: str, **sizes: int) -> DeviceMesh:
    """Build a `DeviceMesh` from named sizes: `build_mesh("cuda", dp=2, tp=4)`.

    Args:
        device_type: "cpu", or the type of this machine's accelerator, such as "cuda".
        **sizes: ranks per axis, outermost axis first. Ranks that are neighbors on the last axis have consecutive
            numbers.

    Returns: a mesh over all processes. If no process group exists, `torch.distributed` is initialized from the
        environment; a mesh of one rank needs no launcher. From then on an uncaught error of this process reaches the
        ranks that wait in a handshake for it.
    Raises:
        MeshError: `no-axes`; `no-device`; `wrong-world-size` if the product of the sizes is not the number of
            processes, with the line that starts as many; `bad-environment` where a launcher has set some of torch's
            variables and not the others. Also what `MeshSpec` raises for bad names and sizes.
    Cost: none, apart from the creation of process groups.
    """
    publish_uncaught_errors()
    if not sizes:
        raise MeshError(Problem("no-axes", "a mesh needs named axes", fix='build_mesh("cuda", dp=2, tp=4)'))
    spec = MeshSpec(tuple(sizes.items()))
    _check_device(device_type)
    join_processes(spec)
    return init_device_mesh(device_type, spec.sizes, mesh_dim_names=spec.names)


def _check_device(device_type: str) -> None:
    accelerator = torch.accelerator.current_accelerator()
    types = ["cpu", *([accelerator.type] if accelerator is not None else [])]
    if device_type not in types:
        raise MeshError(Problem("no-device", f"this machine has no {device_type!r}", fix="one of: " + ", ".join(types)))


def mesh_spec(mesh: DeviceMesh) -> MeshSpec:
    """The names and sizes of a mesh, without its devices.

    Args:
        mesh: any `DeviceMesh`. If it has no names, a 1-D mesh becomes `tp`; the axes of others are `axis0`, `axis1`,
            ...

    Returns: the axes as a `MeshSpec`, in the order of the mesh.
    Raises:
        MeshError: what `MeshSpec` raises for bad names and sizes.
    Cost: no communication.
    """
    names = mesh.mesh_dim_names or (("tp",) if mesh.ndim == 1 else tuple(f"axis{i}" for i in range(mesh.ndim)))
    return MeshSpec(list(zip(names, mesh.shape, strict=True)))


def require_names(mesh: DeviceMesh) -> None:
    """Raises: MeshError `unnamed-mesh`: nothing says which axis is which."""
    if not mesh.mesh_dim_names:
        sizes = tuple(mesh.shape)
        names = tuple(("dp", "tp")[-len(sizes) :])
        fix = f'build_mesh("cuda", dp=..., tp=...); or init_device_mesh("cuda", {sizes}, mesh_dim_names={names})'
        what = f"the axes of the mesh {list(sizes)} have no names, which say what each is for"
        raise MeshError(Problem("unnamed-mesh", what, fix=fix))


def tp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The submesh for tensor parallelism: the axis named `tp`, or a 1-D mesh whose axis has no reserved name.

    Raises: MeshError `no-tp-axis`.
    """
    names = mesh.mesh_dim_names
    if names and "tp" in names:
        return mesh["tp"] if mesh.ndim > 1 else mesh
    if mesh.ndim == 1 and (not names or names[0] not in AXES):
        return mesh
    raise MeshError(
        Problem(
            "no-tp-axis",
            f"the mesh {mesh_spec(mesh)} has no axis named tp",
            fix='name one: build_mesh("cuda", dp=2, tp=4), or pass a 1-D mesh',
        )
    )


# -- started processes -----------------------------------------------------------------------------------------------
# The processes that were started for a mesh: counted before any of them waits for another one.


_NUMBERS, _ADDRESS = ("RANK", "WORLD_SIZE"), ("MASTER_ADDR", "MASTER_PORT")


def join_processes(spec: MeshSpec) -> None:
    """Check that as many processes run as the mesh has ranks. One that no launcher has started becomes a group of one
    here, for a mesh of one; else PyTorch makes the group from the variables of the launcher, which are complete.

    Raises: MeshError `bad-environment`, `wrong-world-size`; on every rank alike, before a rank waits for another one.
    """
    if dist.is_initialized():
        _check_count(spec, dist.get_world_size())
        return
    if not any(os.environ.get(name) for name in _NUMBERS):
        _check_count(spec, 1, "no launcher has set RANK and WORLD_SIZE")
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in (*_NUMBERS, *_ADDRESS) if not os.environ.get(name)]
    if missing:
        there = [name for name in (*_NUMBERS, *_ADDRESS) if name not in missing]
        what = f"{', '.join(there)} are set, but not {', '.join(missing)}, by which processes find each other"
        raise MeshError(Problem("bad-environment", what, fix=f"{_command(spec)}, which sets all of them"))
    text = os.environ["WORLD_SIZE"]
    if not text.isdigit():
        what = f"WORLD_SIZE is {text!r}, which is no number"
        raise MeshError(Problem("bad-environment", what, fix=f"{_command(spec)}, which sets it"))
    _check_count(spec, int(text), "WORLD_SIZE of the launcher")


def _check_count(spec: MeshSpec, processes: int, by: str = "") -> None:
    if processes != spec.world_size:
        ranks = "1 rank" if spec.world_size == 1 else f"{spec.world_size} ranks"
        running = "1 process runs" if processes == 1 else f"{processes} processes run"
        what = f"{spec} needs {ranks}, and {running}{f' ({by})' if by else ''}"
        fix = f"{_command(spec)}; or sizes that multiply to {processes}"
        raise MeshError(Problem("wrong-world-size", what, fix=fix))


def _command(spec: MeshSpec) -> str:
    """The line that starts as many processes as the mesh needs: on the nodes of this job where they can have equally
    many."""
    local, world = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    nodes = int(world) // max(int(local), 1) if local.isdigit() and world.isdigit() else 1
    if nodes < 2 or spec.world_size % nodes:
        nodes = 1
    script = Path(sys.argv[0]).name if sys.argv[0].endswith(".py") else "..."
    more = " ..." if sys.argv[1:] and script != "..." else ""
    on_nodes = f"--nnodes {nodes} " if nodes > 1 else ""
    return f"torchrun {on_nodes}--nproc-per-node {spec.world_size // nodes} {script}{more}"
