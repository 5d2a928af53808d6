"""Device meshes: built from named sizes, described by a `MeshSpec`, and changed for experts and for `tp`."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelize.base.errors import MeshError, Problem
from parallelize.base.mesh import AXES, MeshSpec, folded, folding_order
from parallelize.comm.started_processes import join_processes
from parallelize.comm.uncaught_errors import publish_uncaught_errors


def build_mesh(device_type: str, **sizes: int) -> DeviceMesh:
    """Build a `DeviceMesh` from named sizes: `build_mesh("cuda", dp=2, tp=4)`.

    Args:
        device_type: "cpu", or the type of this machine's accelerator, such as "cuda".
        **sizes: ranks per axis, outermost axis first. Ranks that are neighbors on the last axis have consecutive numbers.

    Returns: a mesh over all processes. If no process group exists, `torch.distributed` is initialized from the environment; a mesh of
        one rank needs no launcher. From then on an uncaught error of this process reaches the ranks that wait in a handshake for it.
    Raises:
        MeshError: `no-axes`; `no-device`; `wrong-world-size` if the product of the sizes is not the number of processes, with the
            line that starts as many; `bad-environment` where a launcher has set some of torch's variables and not the others.
            Also what `MeshSpec` raises for bad names and sizes.
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
        mesh: any `DeviceMesh`. If it has no names, a 1-D mesh becomes `tp`; the axes of others are `axis0`, `axis1`, ...

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


def fold_mesh(mesh: DeviceMesh, expert_ranks: int) -> DeviceMesh:
    """The mesh of the same ranks as experts see them, with the axes edp and ep instead of dp, cp and tp: see `mesh.folded`.

    Call it on every rank of the mesh. Cost: the creation of process groups.
    """
    spec = mesh_spec(mesh)
    order = [spec.names.index(name) for name in folding_order(spec)]
    expert_spec = folded(spec, expert_ranks)
    ranks = mesh.mesh.permute(order).reshape(expert_spec.sizes)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=expert_spec.names)


def with_tp(mesh: DeviceMesh) -> DeviceMesh:
    """The same mesh with an axis tp of one rank, where it has none. Call it on every rank of the mesh."""
    spec = mesh_spec(mesh)
    if "tp" in spec.names:
        return mesh
    return DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(-1), mesh_dim_names=(*spec.names, "tp"))
