"""Parallelise stock PyTorch modules by plans: tensor, sequence and loss parallelism on a `DeviceMesh`.

Importing this package does not import torch: names are loaded on first use, so that the command line answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "parallelize.apply": ["parallelize_module"],
    "parallelize.accumulate": ["accumulate_gradients"],
    "parallelize.clip": ["clip_grad_norm_"],
    "parallelize.errors": [
        "HandshakeError",
        "MeshError",
        "ModelError",
        "ParallelizeError",
        "PlanError",
        "Problem",
        "ShapeError",
    ],
    "parallelize.groups": ["axis_group", "build_mesh", "destroy_groups", "group_for", "mesh_spec"],
    "parallelize.hardware": ["LinkProfile"],
    "parallelize.layout": ["Layout", "SlicePair"],
    "parallelize.loss": ["cross_entropy", "loss_parallel", "valid_tokens"],
    "parallelize.meta": ["materialize"],
    "parallelize.mesh": ["MeshSpec"],
    "parallelize.ops.calibrate": ["calibrate"],
    "parallelize.ops.collective_matmul": [
        "all_gather_linear",
        "column_linear",
        "linear_all_reduce",
        "linear_reduce_scatter",
    ],
    "parallelize.ops.linear_gradients": ["DeferredGradients"],
    "parallelize.optimizer": ["local_optimizer"],
    "parallelize.overlap": ["deferred_gradients"],
    "parallelize.plan.load": ["load_plan", "shipped_plans"],
    "parallelize.plan.schema": ["Plan"],
    "parallelize.report": ["describe_plan", "overlap_counts", "overlap_report"],
    "parallelize.sharded_logits": ["ShardedLogits"],
    "parallelize.sharding": ["ShardInfo", "full_gradients", "full_parameter", "full_state_dict", "shard_info"],
    "parallelize.torch_styles.boundary": [
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "SequenceParallel",
    ],
    "parallelize.torch_styles.linear": ["ColwiseParallel", "RowwiseParallel"],
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'parallelize' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from parallelize.accumulate import accumulate_gradients as accumulate_gradients
    from parallelize.apply import parallelize_module as parallelize_module
    from parallelize.clip import clip_grad_norm_ as clip_grad_norm_
    from parallelize.errors import HandshakeError as HandshakeError
    from parallelize.errors import MeshError as MeshError
    from parallelize.errors import ModelError as ModelError
    from parallelize.errors import ParallelizeError as ParallelizeError
    from parallelize.errors import PlanError as PlanError
    from parallelize.errors import Problem as Problem
    from parallelize.errors import ShapeError as ShapeError
    from parallelize.groups import axis_group as axis_group
    from parallelize.groups import build_mesh as build_mesh
    from parallelize.groups import destroy_groups as destroy_groups
    from parallelize.groups import group_for as group_for
    from parallelize.groups import mesh_spec as mesh_spec
    from parallelize.hardware import LinkProfile as LinkProfile
    from parallelize.layout import Layout as Layout
    from parallelize.layout import SlicePair as SlicePair
    from parallelize.loss import cross_entropy as cross_entropy
    from parallelize.loss import loss_parallel as loss_parallel
    from parallelize.loss import valid_tokens as valid_tokens
    from parallelize.mesh import MeshSpec as MeshSpec
    from parallelize.meta import materialize as materialize
    from parallelize.ops.calibrate import calibrate as calibrate
    from parallelize.ops.collective_matmul import all_gather_linear as all_gather_linear
    from parallelize.ops.collective_matmul import column_linear as column_linear
    from parallelize.ops.collective_matmul import linear_all_reduce as linear_all_reduce
    from parallelize.ops.collective_matmul import linear_reduce_scatter as linear_reduce_scatter
    from parallelize.ops.linear_gradients import DeferredGradients as DeferredGradients
    from parallelize.optimizer import local_optimizer as local_optimizer
    from parallelize.overlap import deferred_gradients as deferred_gradients
    from parallelize.plan.load import load_plan as load_plan
    from parallelize.plan.load import shipped_plans as shipped_plans
    from parallelize.plan.schema import Plan as Plan
    from parallelize.report import describe_plan as describe_plan
    from parallelize.report import overlap_counts as overlap_counts
    from parallelize.report import overlap_report as overlap_report
    from parallelize.sharded_logits import ShardedLogits as ShardedLogits
    from parallelize.sharding import ShardInfo as ShardInfo
    from parallelize.sharding import full_gradients as full_gradients
    from parallelize.sharding import full_parameter as full_parameter
    from parallelize.sharding import full_state_dict as full_state_dict
    from parallelize.sharding import shard_info as shard_info
    from parallelize.torch_styles.boundary import PrepareModuleInput as PrepareModuleInput
    from parallelize.torch_styles.boundary import PrepareModuleInputOutput as PrepareModuleInputOutput
    from parallelize.torch_styles.boundary import PrepareModuleOutput as PrepareModuleOutput
    from parallelize.torch_styles.boundary import SequenceParallel as SequenceParallel
    from parallelize.torch_styles.linear import ColwiseParallel as ColwiseParallel
    from parallelize.torch_styles.linear import RowwiseParallel as RowwiseParallel
