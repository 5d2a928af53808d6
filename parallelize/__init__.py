"""Parallelize stock PyTorch modules by plans: tensor, sequence, pipeline, context and data parallelism on a
`DeviceMesh`.

The imports below are the one list of public names. Type checkers execute them; at run time the same lines are read as
text, and each name is imported on first use. So importing this package does not import torch, and the command line
answers at once.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from parallelize.base.moved import MOVED as _MOVED
from parallelize.base.moved import find_moved as _find_moved
from parallelize.base.providers import provide as _provide

__version__ = "0.1.0"

if TYPE_CHECKING:
    from parallelize.axes.context.context_parallel import context_parallel as context_parallel
    from parallelize.axes.context.inputs import next_tokens as next_tokens
    from parallelize.axes.context.local_sequences import gather_sequence as gather_sequence
    from parallelize.axes.context.local_sequences import split_sequence as split_sequence
    from parallelize.axes.pipeline.cut import cut_pipeline as cut_pipeline
    from parallelize.axes.pipeline.engine import Pipeline as Pipeline
    from parallelize.axes.pipeline.parallel_model import ParallelModel as ParallelModel
    from parallelize.axes.pipeline.schedule_chart import describe_schedule as describe_schedule
    from parallelize.axes.pipeline.schedules import Schedule as Schedule
    from parallelize.axes.pipeline.schedules import build_schedule as build_schedule
    from parallelize.axes.pipeline.ties import tie_parameters as tie_parameters
    from parallelize.axes.pipeline.timeline import Timeline as Timeline
    from parallelize.axes.pipeline.timeline import simulate as simulate
    from parallelize.axes.recomputation.recompute import recompute as recompute
    from parallelize.axes.recomputation.recompute import recompute_cost as recompute_cost
    from parallelize.axes.recomputation.recompute import recomputed as recomputed
    from parallelize.axes.recomputation.recompute import set_recompute as set_recompute
    from parallelize.axes.tensor.experts.expert_bias import ExpertBalance as ExpertBalance
    from parallelize.axes.tensor.experts.expert_bias import balance_experts as balance_experts
    from parallelize.axes.tensor.experts.replayed_routes import RecordedRoutes as RecordedRoutes
    from parallelize.axes.tensor.experts.replayed_routes import record_routes as record_routes
    from parallelize.axes.tensor.experts.replayed_routes import replay_routes as replay_routes
    from parallelize.axes.tensor.experts.routing_load import RoutingLoad as RoutingLoad
    from parallelize.axes.tensor.experts.routing_load import balanced_routing as balanced_routing
    from parallelize.axes.tensor.experts.routing_load import routing_load as routing_load
    from parallelize.axes.tensor.overlap_sites import deferred_gradients as deferred_gradients
    from parallelize.axes.tensor.torch_styles.styles import ColwiseParallel as ColwiseParallel
    from parallelize.axes.tensor.torch_styles.styles import PrepareModuleInput as PrepareModuleInput
    from parallelize.axes.tensor.torch_styles.styles import PrepareModuleInputOutput as PrepareModuleInputOutput
    from parallelize.axes.tensor.torch_styles.styles import PrepareModuleOutput as PrepareModuleOutput
    from parallelize.axes.tensor.torch_styles.styles import RowwiseParallel as RowwiseParallel
    from parallelize.axes.tensor.torch_styles.styles import SequenceParallel as SequenceParallel
    from parallelize.axes.vocabulary.generation.loop import generate as generate
    from parallelize.axes.vocabulary.logits.deferred_logits import DeferredLogits as DeferredLogits
    from parallelize.axes.vocabulary.logits.sharded_logits import ShardedLogits as ShardedLogits
    from parallelize.axes.vocabulary.loss.distillation import distillation_loss as distillation_loss
    from parallelize.axes.vocabulary.loss.distillation import linear_distillation_loss as linear_distillation_loss
    from parallelize.axes.vocabulary.loss.losses import cross_entropy as cross_entropy
    from parallelize.axes.vocabulary.loss.losses import linear_cross_entropy as linear_cross_entropy
    from parallelize.axes.vocabulary.loss.losses import linear_token_log_probs as linear_token_log_probs
    from parallelize.axes.vocabulary.loss.losses import loss_parallel as loss_parallel
    from parallelize.axes.vocabulary.loss.losses import token_entropy as token_entropy
    from parallelize.axes.vocabulary.loss.losses import token_log_probs as token_log_probs
    from parallelize.axes.vocabulary.loss.losses import token_log_probs_and_entropy as token_log_probs_and_entropy
    from parallelize.axes.vocabulary.loss.losses import valid_tokens as valid_tokens
    from parallelize.axes.vocabulary.loss.sequences import sequence_log_probs as sequence_log_probs
    from parallelize.axes.vocabulary.loss.sequences import sequence_sum as sequence_sum
    from parallelize.axes.vocabulary.loss.top_k import candidate_log_probs as candidate_log_probs
    from parallelize.axes.vocabulary.loss.top_k import top_k_distillation_loss as top_k_distillation_loss
    from parallelize.axes.vocabulary.loss.top_k import top_k_log_probs as top_k_log_probs
    from parallelize.axes.vocabulary.sampling.draw import sample as sample
    from parallelize.axes.zero.optimizer import build_optimizer as build_optimizer
    from parallelize.axes.zero.shard_data import shard_data as shard_data
    from parallelize.axes.zero.state_bytes import bytes_per_rank as bytes_per_rank
    from parallelize.axes.zero.weight_penalty import add_penalty as add_penalty
    from parallelize.base.errors import CheckpointError as CheckpointError
    from parallelize.base.errors import DataError as DataError
    from parallelize.base.errors import GradientError as GradientError
    from parallelize.base.errors import HandshakeError as HandshakeError
    from parallelize.base.errors import LaunchError as LaunchError
    from parallelize.base.errors import MeshError as MeshError
    from parallelize.base.errors import ModelError as ModelError
    from parallelize.base.errors import ParallelizeError as ParallelizeError
    from parallelize.base.errors import PipelineError as PipelineError
    from parallelize.base.errors import PlanError as PlanError
    from parallelize.base.errors import Problem as Problem
    from parallelize.base.errors import ShapeError as ShapeError
    from parallelize.base.layout import Layout as Layout
    from parallelize.base.layout import SlicePair as SlicePair
    from parallelize.base.mesh import MeshSpec as MeshSpec
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
    from parallelize.ops.matmul.calibrate import calibrate as calibrate
    from parallelize.ops.matmul.collective_matmul import all_gather_linear as all_gather_linear
    from parallelize.ops.matmul.collective_matmul import column_linear as column_linear
    from parallelize.ops.matmul.collective_matmul import linear_all_reduce as linear_all_reduce
    from parallelize.ops.matmul.collective_matmul import linear_reduce_scatter as linear_reduce_scatter
    from parallelize.ops.matmul.dtensor_linears import OverlappedLinears as OverlappedLinears
    from parallelize.ops.matmul.dtensor_linears import overlapped_linears as overlapped_linears
    from parallelize.ops.matmul.linear_gradients import DeferredGradients as DeferredGradients
    from parallelize.plan.options import Options as Options
    from parallelize.plan.plan_file import load_plan as load_plan
    from parallelize.plan.plan_file import shipped_plans as shipped_plans
    from parallelize.plan.schema import Cuts as Cuts
    from parallelize.plan.schema import Plan as Plan
    from parallelize.plan.schema import Tie as Tie
    from parallelize.plan.styles.contract import Contract as Contract
    from parallelize.plan.styles.contract import Conversion as Conversion
    from parallelize.plan.styles.contract import Traits as Traits
    from parallelize.plan.styles.contract import Use as Use
    from parallelize.plan.styles.style import ModuleFacts as ModuleFacts
    from parallelize.plan.styles.style import Style as Style
    from parallelize.plan.styles.style import StyleContext as StyleContext
    from parallelize.plan.styles.style import StyleText as StyleText
    from parallelize.plan.styles.style import register_style as register_style
    from parallelize.state.full_values import full_gradients as full_gradients
    from parallelize.state.full_values import full_parameter as full_parameter
    from parallelize.state.full_values import full_state_dict as full_state_dict
    from parallelize.state.loop.accumulate import accumulate_gradients as accumulate_gradients
    from parallelize.state.loop.clip import clip_grad_norm_ as clip_grad_norm_
    from parallelize.state.loop.local_optimizer import local_optimizer as local_optimizer
    from parallelize.state.loop.loggers import ConsoleLogger as ConsoleLogger
    from parallelize.state.loop.loggers import HubLogger as HubLogger
    from parallelize.state.loop.loggers import JSONLinesLogger as JSONLinesLogger
    from parallelize.state.loop.loggers import Logger as Logger
    from parallelize.state.loop.loggers import Loggers as Loggers
    from parallelize.state.loop.loggers import TensorBoardLogger as TensorBoardLogger
    from parallelize.state.loop.wandb_logger import WandbLogger as WandbLogger
    from parallelize.state.meta_buffers import materialize as materialize
    from parallelize.state.optimizers.muon import Muon as Muon
    from parallelize.state.quantization.import_quantized import import_quantized as import_quantized
    from parallelize.state.quantization.quantize import dequantize as dequantize
    from parallelize.state.quantization.quantize import quantize as quantize
    from parallelize.state.quantization.quantized_linear import QuantizedLinear as QuantizedLinear
    from parallelize.state.randomness.dropout.install import install_dropout as install_dropout
    from parallelize.state.randomness.dropout.position import Position as Position
    from parallelize.state.randomness.generators import random_state as random_state
    from parallelize.state.randomness.generators import set_random_state as set_random_state
    from parallelize.state.randomness.generators import synchronize_random_state as synchronize_random_state
    from parallelize.state.randomness.init.distributions import Constant as Constant
    from parallelize.state.randomness.init.distributions import Normal as Normal
    from parallelize.state.randomness.init.distributions import TruncatedNormal as TruncatedNormal
    from parallelize.state.randomness.init.distributions import Uniform as Uniform
    from parallelize.state.randomness.init.initialize import build_on_meta as build_on_meta
    from parallelize.state.randomness.init.initialize import building as building
    from parallelize.state.randomness.init.initialize import initialize as initialize
    from parallelize.state.randomness.streams import Streams as Streams
    from parallelize.state.report import describe_plan as describe_plan
    from parallelize.state.report import overlap_counts as overlap_counts
    from parallelize.state.report import overlap_report as overlap_report
    from parallelize.state.shard_info import ShardInfo as ShardInfo
    from parallelize.state.shard_info import shard_info as shard_info
    from parallelize.state.stored_slices import tied_names as tied_names
    from parallelize.tools.analysis.cost.load_balance import LoadBalance as LoadBalance
    from parallelize.tools.analysis.cost.load_balance import LoadRecord as LoadRecord
    from parallelize.tools.analysis.explain import explain as explain
    from parallelize.tools.analysis.linting import Finding as Finding
    from parallelize.tools.analysis.linting import lint as lint
    from parallelize.tools.analysis.show.explanation import Explanation as Explanation
    from parallelize.tools.derivation.derive import Derived as Derived
    from parallelize.tools.derivation.derive import derive_plan as derive_plan
    from parallelize.tools.verification.compare import Verification as Verification
    from parallelize.tools.verification.verify import assert_verified as assert_verified
    from parallelize.tools.verification.verify import verify as verify
    from parallelize.training.apply_axes import parallelize_model as parallelize_model
    from parallelize.training.apply_plan import parallelize_module as parallelize_module
    from parallelize.training.data.balanced_deal import RowCosts as RowCosts
    from parallelize.training.data.balanced_deal import balanced_deal as balanced_deal
    from parallelize.training.data.collate import collate_rows as collate_rows
    from parallelize.training.data.global_batches import GlobalBatches as GlobalBatches
    from parallelize.training.data.iterable_batches import IterableBatches as IterableBatches
    from parallelize.training.data.loader_check import check_loader as check_loader
    from parallelize.training.data.packing import FittedRows as FittedRows
    from parallelize.training.data.packing import JoinedRows as JoinedRows
    from parallelize.training.data.packing import PackedDocuments as PackedDocuments
    from parallelize.training.data.packing import PackedRows as PackedRows
    from parallelize.training.trainers.sft import ParallelSFTTrainer as ParallelSFTTrainer
    from parallelize.training.trainers.trainer import ParallelTrainer as ParallelTrainer
    from parallelize.watchdog.watching import Watch as Watch
    from parallelize.watchdog.watching import watch as watch


def _public_names() -> dict[str, str]:
    """Public name to the module that defines it, read from the imports above."""
    source = __spec__.loader.get_source(__name__)  # type: ignore[union-attr]
    imports = re.findall(r"^    from (parallelize\S*) import (\w+) as \w+$", source, re.MULTILINE)
    return {name: module for module, name in imports}


_find_moved()
_provide(
    derived_plans="parallelize.tools.derivation.auto",
    trace="parallelize.tools.analysis.automatic_trace",
    tensor_guards="parallelize.axes.tensor.torch_styles.tensor_guards",
    data_guards="parallelize.axes.zero.data_guards",
    adapted_experts="parallelize.adapters.adapted_experts",
    adapted_layers="parallelize.adapters.adapted_layers",
    adapter_guards="parallelize.adapters.adapter_guards",
    loop_guards="parallelize.training.loop_guards",
)
_HOME = _public_names()
__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'parallelize' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
