"""Parallelize stock PyTorch modules by plans: tensor, sequence, pipeline, context and data parallelism on a `DeviceMesh`.

The imports below are the one list of public names. Type checkers execute them; at run time the same lines are read as
text, and each name is imported on first use. So importing this package does not import torch, and the command line
answers at once.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from parallelize.analysis.explain import explain as explain
    from parallelize.analysis.linting import Finding as Finding
    from parallelize.analysis.linting import lint as lint
    from parallelize.analysis.show.explanation import Explanation as Explanation
    from parallelize.applied.full_values import full_gradients as full_gradients
    from parallelize.applied.full_values import full_parameter as full_parameter
    from parallelize.applied.full_values import full_state_dict as full_state_dict
    from parallelize.applied.meta_buffers import materialize as materialize
    from parallelize.applied.report import describe_plan as describe_plan
    from parallelize.applied.report import overlap_counts as overlap_counts
    from parallelize.applied.report import overlap_report as overlap_report
    from parallelize.applied.shard_info import ShardInfo as ShardInfo
    from parallelize.applied.shard_info import shard_info as shard_info
    from parallelize.applied.tied_names import tied_names as tied_names
    from parallelize.apply import parallelize_module as parallelize_module
    from parallelize.checkpoint.export.engines import named_tensors as named_tensors
    from parallelize.checkpoint.export.engines import verl_per_tensor_param as verl_per_tensor_param
    from parallelize.checkpoint.export.engines import vllm_update_info as vllm_update_info
    from parallelize.checkpoint.export.engines import vllm_weight_source as vllm_weight_source
    from parallelize.checkpoint.export.export_weights import WeightExporter as WeightExporter
    from parallelize.checkpoint.export.export_weights import export_weights as export_weights
    from parallelize.checkpoint.hub.adapter_folder import save_adapter as save_adapter
    from parallelize.checkpoint.hub.export import save_pretrained as save_pretrained
    from parallelize.checkpoint.hub.pretrained import load_pretrained as load_pretrained
    from parallelize.checkpoint.run.checkpointer import Checkpointer as Checkpointer
    from parallelize.checkpoint.run.load_checkpoint import load_checkpoint as load_checkpoint
    from parallelize.checkpoint.run.rebuild import Rebuilt as Rebuilt
    from parallelize.checkpoint.run.rebuild import rebuild as rebuild
    from parallelize.comm.groups import axis_group as axis_group
    from parallelize.comm.groups import destroy_groups as destroy_groups
    from parallelize.comm.groups import group_for as group_for
    from parallelize.comm.link_profile import LinkProfile as LinkProfile
    from parallelize.comm.meshes import build_mesh as build_mesh
    from parallelize.comm.meshes import mesh_spec as mesh_spec
    from parallelize.context.context_parallel import context_parallel as context_parallel
    from parallelize.context.inputs import next_tokens as next_tokens
    from parallelize.context.local_sequences import gather_sequence as gather_sequence
    from parallelize.context.local_sequences import split_sequence as split_sequence
    from parallelize.data.collate import collate_rows as collate_rows
    from parallelize.data.global_batches import GlobalBatches as GlobalBatches
    from parallelize.data.iterable_batches import IterableBatches as IterableBatches
    from parallelize.data.loader_check import check_loader as check_loader
    from parallelize.data.packing import FittedRows as FittedRows
    from parallelize.data.packing import PackedDocuments as PackedDocuments
    from parallelize.data.packing import PackedRows as PackedRows
    from parallelize.derivation.derive import Derived as Derived
    from parallelize.derivation.derive import derive_plan as derive_plan
    from parallelize.errors import CheckpointError as CheckpointError
    from parallelize.errors import DataError as DataError
    from parallelize.errors import GradientError as GradientError
    from parallelize.errors import HandshakeError as HandshakeError
    from parallelize.errors import LaunchError as LaunchError
    from parallelize.errors import MeshError as MeshError
    from parallelize.errors import ModelError as ModelError
    from parallelize.errors import ParallelizeError as ParallelizeError
    from parallelize.errors import PipelineError as PipelineError
    from parallelize.errors import PlanError as PlanError
    from parallelize.errors import Problem as Problem
    from parallelize.errors import ShapeError as ShapeError
    from parallelize.layout import Layout as Layout
    from parallelize.layout import SlicePair as SlicePair
    from parallelize.loop.accumulate import accumulate_gradients as accumulate_gradients
    from parallelize.loop.clip import clip_grad_norm_ as clip_grad_norm_
    from parallelize.loop.local_optimizer import local_optimizer as local_optimizer
    from parallelize.loop.loggers import ConsoleLogger as ConsoleLogger
    from parallelize.loop.loggers import HubLogger as HubLogger
    from parallelize.loop.loggers import JSONLinesLogger as JSONLinesLogger
    from parallelize.loop.loggers import Logger as Logger
    from parallelize.loop.loggers import Loggers as Loggers
    from parallelize.loop.loggers import TensorBoardLogger as TensorBoardLogger
    from parallelize.loop.wandb_logger import WandbLogger as WandbLogger
    from parallelize.mesh import MeshSpec as MeshSpec
    from parallelize.ops.matmul.calibrate import calibrate as calibrate
    from parallelize.ops.matmul.collective_matmul import all_gather_linear as all_gather_linear
    from parallelize.ops.matmul.collective_matmul import column_linear as column_linear
    from parallelize.ops.matmul.collective_matmul import linear_all_reduce as linear_all_reduce
    from parallelize.ops.matmul.collective_matmul import linear_reduce_scatter as linear_reduce_scatter
    from parallelize.ops.matmul.dtensor_linears import OverlappedLinears as OverlappedLinears
    from parallelize.ops.matmul.dtensor_linears import overlapped_linears as overlapped_linears
    from parallelize.ops.matmul.linear_gradients import DeferredGradients as DeferredGradients
    from parallelize.optimizers.muon import Muon as Muon
    from parallelize.pipeline.cut import cut_pipeline as cut_pipeline
    from parallelize.pipeline.engine import Pipeline as Pipeline
    from parallelize.pipeline.parallel_model import ParallelModel as ParallelModel
    from parallelize.pipeline.schedule_chart import describe_schedule as describe_schedule
    from parallelize.pipeline.schedules import Schedule as Schedule
    from parallelize.pipeline.schedules import build_schedule as build_schedule
    from parallelize.pipeline.ties import tie_parameters as tie_parameters
    from parallelize.pipeline.timeline import Timeline as Timeline
    from parallelize.pipeline.timeline import simulate as simulate
    from parallelize.plan.options import Options as Options
    from parallelize.plan.plan_file import load_plan as load_plan
    from parallelize.plan.plan_file import shipped_plans as shipped_plans
    from parallelize.plan.schema import Cuts as Cuts
    from parallelize.plan.schema import Plan as Plan
    from parallelize.plan.schema import Tie as Tie
    from parallelize.quantization.import_quantized import import_quantized as import_quantized
    from parallelize.quantization.quantize import dequantize as dequantize
    from parallelize.quantization.quantize import quantize as quantize
    from parallelize.quantization.quantized_linear import QuantizedLinear as QuantizedLinear
    from parallelize.randomness.dropout.install import install_dropout as install_dropout
    from parallelize.randomness.dropout.position import Position as Position
    from parallelize.randomness.generators import random_state as random_state
    from parallelize.randomness.generators import set_random_state as set_random_state
    from parallelize.randomness.generators import synchronize_random_state as synchronize_random_state
    from parallelize.randomness.init.building import building as building
    from parallelize.randomness.init.distributions import Constant as Constant
    from parallelize.randomness.init.distributions import Normal as Normal
    from parallelize.randomness.init.distributions import TruncatedNormal as TruncatedNormal
    from parallelize.randomness.init.distributions import Uniform as Uniform
    from parallelize.randomness.init.initialize import build_on_meta as build_on_meta
    from parallelize.randomness.init.initialize import initialize as initialize
    from parallelize.randomness.streams import Streams as Streams
    from parallelize.recomputation.recompute import recompute as recompute
    from parallelize.recomputation.recompute import recompute_cost as recompute_cost
    from parallelize.recomputation.recompute import recomputed as recomputed
    from parallelize.recomputation.recompute import set_recompute as set_recompute
    from parallelize.styles.contract import Contract as Contract
    from parallelize.styles.contract import Conversion as Conversion
    from parallelize.styles.contract import Traits as Traits
    from parallelize.styles.contract import Use as Use
    from parallelize.styles.style import ModuleFacts as ModuleFacts
    from parallelize.styles.style import Style as Style
    from parallelize.styles.style import StyleContext as StyleContext
    from parallelize.styles.style import StyleText as StyleText
    from parallelize.styles.style import register_style as register_style
    from parallelize.tensor.experts.balanced_routing import balanced_routing as balanced_routing
    from parallelize.tensor.experts.expert_bias import ExpertBalance as ExpertBalance
    from parallelize.tensor.experts.expert_bias import balance_experts as balance_experts
    from parallelize.tensor.experts.recorded_routes import RecordedRoutes as RecordedRoutes
    from parallelize.tensor.experts.recorded_routes import record_routes as record_routes
    from parallelize.tensor.experts.replayed_routes import replay_routes as replay_routes
    from parallelize.tensor.experts.routing_load import RoutingLoad as RoutingLoad
    from parallelize.tensor.experts.routing_load import routing_load as routing_load
    from parallelize.tensor.overlap_sites import deferred_gradients as deferred_gradients
    from parallelize.tensor.torch_styles.boundary import PrepareModuleInput as PrepareModuleInput
    from parallelize.tensor.torch_styles.boundary import PrepareModuleInputOutput as PrepareModuleInputOutput
    from parallelize.tensor.torch_styles.boundary import PrepareModuleOutput as PrepareModuleOutput
    from parallelize.tensor.torch_styles.boundary import SequenceParallel as SequenceParallel
    from parallelize.tensor.torch_styles.linear import ColwiseParallel as ColwiseParallel
    from parallelize.tensor.torch_styles.linear import RowwiseParallel as RowwiseParallel
    from parallelize.trainers.sft import ParallelSFTTrainer as ParallelSFTTrainer
    from parallelize.trainers.trainer import ParallelTrainer as ParallelTrainer
    from parallelize.training import parallelize_model as parallelize_model
    from parallelize.verification.result import Verification as Verification
    from parallelize.verification.verify import assert_verified as assert_verified
    from parallelize.verification.verify import verify as verify
    from parallelize.vocabulary.generation.loop import generate as generate
    from parallelize.vocabulary.logits.deferred_logits import DeferredLogits as DeferredLogits
    from parallelize.vocabulary.logits.sharded_logits import ShardedLogits as ShardedLogits
    from parallelize.vocabulary.loss.log_probs import linear_token_log_probs as linear_token_log_probs
    from parallelize.vocabulary.loss.log_probs import token_entropy as token_entropy
    from parallelize.vocabulary.loss.log_probs import token_log_probs as token_log_probs
    from parallelize.vocabulary.loss.log_probs import token_log_probs_and_entropy as token_log_probs_and_entropy
    from parallelize.vocabulary.loss.losses import cross_entropy as cross_entropy
    from parallelize.vocabulary.loss.losses import linear_cross_entropy as linear_cross_entropy
    from parallelize.vocabulary.loss.losses import loss_parallel as loss_parallel
    from parallelize.vocabulary.loss.losses import valid_tokens as valid_tokens
    from parallelize.vocabulary.sampling.draw import sample as sample
    from parallelize.watchdog.watching import Watch as Watch
    from parallelize.watchdog.watching import watch as watch
    from parallelize.zero.optimizer import build_optimizer as build_optimizer
    from parallelize.zero.shard_data import shard_data as shard_data
    from parallelize.zero.state_bytes import bytes_per_rank as bytes_per_rank
    from parallelize.zero.weight_penalty import add_penalty as add_penalty


def _public_names() -> dict[str, str]:
    """Public name to the module that defines it, read from the imports above."""
    source = __spec__.loader.get_source(__name__)  # type: ignore[union-attr]
    imports = re.findall(r"^    from (parallelize\S*) import (\w+) as \w+$", source, re.MULTILINE)
    return {name: module for module, name in imports}


_HOME = _public_names()
__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'parallelize' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
