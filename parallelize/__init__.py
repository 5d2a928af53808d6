"""Parallelise stock PyTorch modules by plans: tensor, sequence, pipeline and data parallelism on a `DeviceMesh`.

Importing this package does not import torch: names are loaded on first use, so that the command line answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "parallelize.accumulate": ["accumulate_gradients"],
    "parallelize.analysis.explain": ["explain"],
    "parallelize.analysis.explanation": ["Explanation"],
    "parallelize.analysis.linting": ["Finding", "lint"],
    "parallelize.apply": ["parallelize_module"],
    "parallelize.checkpoint.checkpointer": ["Checkpointer", "load_checkpoint"],
    "parallelize.checkpoint.export": ["save_pretrained"],
    "parallelize.checkpoint.pretrained": ["load_pretrained"],
    "parallelize.checkpoint.rebuild": ["Rebuilt", "rebuild"],
    "parallelize.context.apply": ["context_parallel"],
    "parallelize.context.inputs": ["next_tokens"],
    "parallelize.context.sequences": ["gather_sequence", "split_sequence"],
    "parallelize.clip": ["clip_grad_norm_"],
    "parallelize.data": ["GlobalBatches"],
    "parallelize.deferred_logits": ["DeferredLogits"],
    "parallelize.errors": [
        "CheckpointError",
        "GradientError",
        "HandshakeError",
        "MeshError",
        "ModelError",
        "ParallelizeError",
        "PipelineError",
        "PlanError",
        "Problem",
        "ShapeError",
    ],
    "parallelize.generation.loop": ["generate"],
    "parallelize.groups": ["axis_group", "build_mesh", "destroy_groups", "group_for", "mesh_spec"],
    "parallelize.hardware": ["LinkProfile"],
    "parallelize.layout": ["Layout", "SlicePair"],
    "parallelize.logs": ["ConsoleLogger", "HubLogger", "JSONLinesLogger", "Logger", "Loggers", "TensorBoardLogger"],
    "parallelize.log_probs": [
        "linear_token_log_probs",
        "token_entropy",
        "token_log_probs",
        "token_log_probs_and_entropy",
    ],
    "parallelize.loss": ["cross_entropy", "linear_cross_entropy", "loss_parallel", "valid_tokens"],
    "parallelize.mesh": ["MeshSpec"],
    "parallelize.meta": ["materialize"],
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
    "parallelize.pipeline.cut": ["cut_pipeline"],
    "parallelize.pipeline.engine": ["Pipeline"],
    "parallelize.pipeline.gantt": ["describe_schedule"],
    "parallelize.pipeline.schedules": ["Schedule", "build_schedule"],
    "parallelize.pipeline.timeline": ["Timeline", "simulate"],
    "parallelize.plan.load": ["load_plan", "shipped_plans"],
    "parallelize.plan.schema": ["Cuts", "Plan", "Tie"],
    "parallelize.randomness.distributions": ["Constant", "Normal", "TruncatedNormal", "Uniform"],
    "parallelize.randomness.initialise": ["build_on_meta", "initialize"],
    "parallelize.randomness.install": ["install_dropout"],
    "parallelize.randomness.position": ["Position"],
    "parallelize.randomness.streams": ["Streams"],
    "parallelize.recomputation": ["recompute", "recompute_cost", "recomputed", "set_recompute"],
    "parallelize.report": ["describe_plan", "overlap_counts", "overlap_report"],
    "parallelize.sampling.draw": ["sample"],
    "parallelize.sharded_logits": ["ShardedLogits"],
    "parallelize.sharding": ["ShardInfo", "full_gradients", "full_parameter", "full_state_dict", "shard_info"],
    "parallelize.ties": ["tie_parameters"],
    "parallelize.torch_styles.boundary": [
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "SequenceParallel",
    ],
    "parallelize.torch_styles.linear": ["ColwiseParallel", "RowwiseParallel"],
    "parallelize.training": ["ParallelModel", "parallelize_model"],
    "parallelize.verification.api": ["assert_verified", "verify"],
    "parallelize.verification.report": ["Verification"],
    "parallelize.zero.apply": ["shard_data"],
    "parallelize.zero.memory": ["bytes_per_rank"],
    "parallelize.zero.optimizer": ["build_optimizer"],
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
    from parallelize.analysis.explain import explain as explain
    from parallelize.analysis.explanation import Explanation as Explanation
    from parallelize.analysis.linting import Finding as Finding
    from parallelize.analysis.linting import lint as lint
    from parallelize.apply import parallelize_module as parallelize_module
    from parallelize.checkpoint.checkpointer import Checkpointer as Checkpointer
    from parallelize.checkpoint.checkpointer import load_checkpoint as load_checkpoint
    from parallelize.checkpoint.export import save_pretrained as save_pretrained
    from parallelize.checkpoint.pretrained import load_pretrained as load_pretrained
    from parallelize.checkpoint.rebuild import Rebuilt as Rebuilt
    from parallelize.checkpoint.rebuild import rebuild as rebuild
    from parallelize.clip import clip_grad_norm_ as clip_grad_norm_
    from parallelize.context.apply import context_parallel as context_parallel
    from parallelize.context.inputs import next_tokens as next_tokens
    from parallelize.context.sequences import gather_sequence as gather_sequence
    from parallelize.context.sequences import split_sequence as split_sequence
    from parallelize.data import GlobalBatches as GlobalBatches
    from parallelize.deferred_logits import DeferredLogits as DeferredLogits
    from parallelize.errors import CheckpointError as CheckpointError
    from parallelize.errors import GradientError as GradientError
    from parallelize.errors import HandshakeError as HandshakeError
    from parallelize.errors import MeshError as MeshError
    from parallelize.errors import ModelError as ModelError
    from parallelize.errors import ParallelizeError as ParallelizeError
    from parallelize.errors import PipelineError as PipelineError
    from parallelize.errors import PlanError as PlanError
    from parallelize.errors import Problem as Problem
    from parallelize.errors import ShapeError as ShapeError
    from parallelize.generation.loop import generate as generate
    from parallelize.groups import axis_group as axis_group
    from parallelize.groups import build_mesh as build_mesh
    from parallelize.groups import destroy_groups as destroy_groups
    from parallelize.groups import group_for as group_for
    from parallelize.groups import mesh_spec as mesh_spec
    from parallelize.hardware import LinkProfile as LinkProfile
    from parallelize.layout import Layout as Layout
    from parallelize.layout import SlicePair as SlicePair
    from parallelize.log_probs import linear_token_log_probs as linear_token_log_probs
    from parallelize.log_probs import token_entropy as token_entropy
    from parallelize.log_probs import token_log_probs as token_log_probs
    from parallelize.log_probs import token_log_probs_and_entropy as token_log_probs_and_entropy
    from parallelize.logs import ConsoleLogger as ConsoleLogger
    from parallelize.logs import HubLogger as HubLogger
    from parallelize.logs import JSONLinesLogger as JSONLinesLogger
    from parallelize.logs import Logger as Logger
    from parallelize.logs import Loggers as Loggers
    from parallelize.logs import TensorBoardLogger as TensorBoardLogger
    from parallelize.loss import cross_entropy as cross_entropy
    from parallelize.loss import linear_cross_entropy as linear_cross_entropy
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
    from parallelize.pipeline.cut import cut_pipeline as cut_pipeline
    from parallelize.pipeline.engine import Pipeline as Pipeline
    from parallelize.pipeline.gantt import describe_schedule as describe_schedule
    from parallelize.pipeline.schedules import Schedule as Schedule
    from parallelize.pipeline.schedules import build_schedule as build_schedule
    from parallelize.pipeline.timeline import Timeline as Timeline
    from parallelize.pipeline.timeline import simulate as simulate
    from parallelize.plan.load import load_plan as load_plan
    from parallelize.plan.load import shipped_plans as shipped_plans
    from parallelize.plan.schema import Cuts as Cuts
    from parallelize.plan.schema import Plan as Plan
    from parallelize.plan.schema import Tie as Tie
    from parallelize.randomness.distributions import Constant as Constant
    from parallelize.randomness.distributions import Normal as Normal
    from parallelize.randomness.distributions import TruncatedNormal as TruncatedNormal
    from parallelize.randomness.distributions import Uniform as Uniform
    from parallelize.randomness.initialise import build_on_meta as build_on_meta
    from parallelize.randomness.initialise import initialize as initialize
    from parallelize.randomness.install import install_dropout as install_dropout
    from parallelize.randomness.position import Position as Position
    from parallelize.randomness.streams import Streams as Streams
    from parallelize.recomputation import recompute as recompute
    from parallelize.recomputation import recompute_cost as recompute_cost
    from parallelize.recomputation import recomputed as recomputed
    from parallelize.recomputation import set_recompute as set_recompute
    from parallelize.report import describe_plan as describe_plan
    from parallelize.report import overlap_counts as overlap_counts
    from parallelize.report import overlap_report as overlap_report
    from parallelize.sampling.draw import sample as sample
    from parallelize.sharded_logits import ShardedLogits as ShardedLogits
    from parallelize.sharding import ShardInfo as ShardInfo
    from parallelize.sharding import full_gradients as full_gradients
    from parallelize.sharding import full_parameter as full_parameter
    from parallelize.sharding import full_state_dict as full_state_dict
    from parallelize.sharding import shard_info as shard_info
    from parallelize.ties import tie_parameters as tie_parameters
    from parallelize.torch_styles.boundary import PrepareModuleInput as PrepareModuleInput
    from parallelize.torch_styles.boundary import PrepareModuleInputOutput as PrepareModuleInputOutput
    from parallelize.torch_styles.boundary import PrepareModuleOutput as PrepareModuleOutput
    from parallelize.torch_styles.boundary import SequenceParallel as SequenceParallel
    from parallelize.torch_styles.linear import ColwiseParallel as ColwiseParallel
    from parallelize.torch_styles.linear import RowwiseParallel as RowwiseParallel
    from parallelize.training import ParallelModel as ParallelModel
    from parallelize.training import parallelize_model as parallelize_model
    from parallelize.verification.api import assert_verified as assert_verified
    from parallelize.verification.api import verify as verify
    from parallelize.verification.report import Verification as Verification
    from parallelize.zero.apply import shard_data as shard_data
    from parallelize.zero.memory import bytes_per_rank as bytes_per_rank
    from parallelize.zero.optimizer import build_optimizer as build_optimizer
