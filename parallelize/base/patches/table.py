"""Every change that this package makes to another library in the running process: what, why, in which versions, and
from when to when.

Nothing is changed by an import. `active` makes the changes, and refuses one without a row here; `parallelize env`
prints both.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

PLANNED = "a model is planned"
LAST_MODEL = "the last planned model is gone"


@dataclass(frozen=True, slots=True)
class Patch:
    """One change, or several for one reason.

    Attributes:
        target: the full name of a function, class attribute, hook or handler; may have `*`.
        why: what a planned model needs it for.
        versions: the library; and the version from which torch has this name, or a version of another library that was
            tried.
        begins, ends: when the change is made, and when it is undone.
    """

    target: str
    why: str
    versions: str
    begins: str = PLANNED
    ends: str = LAST_MODEL


_PEFT = "peft 0.21"
_INPUTS = "refuses gradients with respect to planned parameters, which PyTorch would leave out"
_CHANGES = "notices modules, parameters and hooks that are added to a planned model"
_LISTS = "divides lists of tensors by mesh, as well as by device and dtype"
_CUT, _DATA, _QUANTIZED = "a model is cut into stages", "data axes are applied", "a model is quantized"
_ADAPTED = "a planned model is given adapters by PEFT, or is planned while PEFT is imported"
_FULL_WEIGHTS = "refuses what reads full weights, of which ranks store shards"
_MERGED = "plans adapters that are merged before a forward"
_BLOCK = "the end of the block"
_RECORDED, _META = "an initialization is recorded", "a forward runs on meta tensors"
_WATCH = {"begins": "a watch is opened", "ends": "the watch is closed"}

TABLE = (
    Patch("torch.autograd.backward", _INPUTS, "torch 0.2"),
    Patch("torch.autograd.grad", _INPUTS, "torch 0.2"),
    Patch("torch.nn.modules.module.Module.register_forward_hook", _CHANGES, "torch 0.2"),
    Patch("torch.nn.modules.container.ModuleList.insert", _CHANGES, "torch 1.0"),
    Patch("torch.nn.modules.container.Sequential.insert", _CHANGES, "torch 2.0"),
    Patch("registration hook of modules", _CHANGES, "torch 2.0"),
    Patch("registration hook of parameters", _CHANGES, "torch 2.0"),
    Patch(
        "torch.nn.attention.flex_attention.flex_attention.__code__",
        "lets plans give its functions the numbers of heads and tokens of the unsharded model; has gradients on CPUs",
        "torch 2.9",
    ),
    Patch("hook before optimizer steps", "refuses steps of optimizers that cannot step a planned model", "torch 1.13"),
    Patch("hook after optimizer steps", "counts writes to the local tensors of planned parameters", "torch 1.13"),
    Patch(
        "torch.distributed.tensor.*DTensor.data",
        "writes to the shard what `parameter.data = ...` is given",
        "torch 2.0",
    ),
    Patch(
        "torch.distributed.tensor.*DTensor.__deepcopy__",
        "copies gradients whose local tensors are views of a buffer; PyTorch looks for a storage that they do not have",
        "torch 2.0",
        begins="data axes are applied to DTensors",
    ),
    Patch("DTensor's handler of _local_scalar_dense", "refuses to read one rank's part of a number", "torch 2.2"),
    Patch("DTensor's handler of *", "refuses draws that users make into shards", "torch 2.2"),
    Patch(
        "torch.distributed.tensor.*DTensor.redistribute",
        "overlaps gathers of DTensors with matmuls",
        "torch 2.0",
        "a block with overlap of DTensors is entered",
    ),
    Patch(
        "torch.nn.parallel.distributed.DistributedDataParallel.__init__",
        "refuses it around a planned model",
        "torch 1.0",
    ),
    Patch("torch.nn.utils.clip_grad._get_total_norm", "takes the norm of the unsharded model", "torch 2.6"),
    Patch("torch.nn.utils.get_total_norm", "takes norms over several meshes", "torch 2.6"),
    Patch("torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype", _LISTS, "torch 2.0"),
    Patch("torch.optim.optimizer._group_tensors_by_device_and_dtype", _LISTS, "torch 2.0"),
    Patch("torch.optim.swa_utils._group_tensors_by_device_and_dtype", _LISTS, "torch 2.0"),
    Patch(
        "torch.amp.grad_scaler.GradScaler._unscale_grads_",
        "all ranks skip a step where one of them has an overflow",
        "torch 1.6",
        f"{_CUT}, or an optimizer of shards is built",
    ),
    Patch(
        "torch.distributed.distributed_c10d._hash_ranks_to_str",
        "names groups that only their own ranks create",
        "torch 2.1",
        "such a group is created",
    ),
    Patch(
        "torch.amp.autocast_mode.autocast.__init__",
        "enters autocast by the device of a meta tensor",
        "torch 2.0",
        _META,
        _BLOCK,
    ),
    Patch(
        "einops.einops._reconstruct_from_shape",
        "computes sizes anew, of which the attributes are followed that gave them",
        "einops 0.9.0dev",
        "a forward is recorded",
        _BLOCK,
    ),
    Patch(
        "torch.nn.init._no_grad_trunc_normal_",
        "records truncated normals on meta tensors",
        "torch 1.5",
        _RECORDED,
        _BLOCK,
    ),
    Patch(
        "torch.utils.data._utils.worker._worker_info",
        "reads one stream in each worker",
        "torch 1.2",
        "samples are read",
        _BLOCK,
    ),
    Patch(
        "torch.testing._internal.distributed.multi_threaded_pg.ProcessLocalGroup",
        "gives threads that stand for ranks their groups",
        "torch 2.0",
        "ranks are threads (`parallelize verify`)",
        _BLOCK,
    ),
    Patch(
        "torch.distributed.checkpoint.state_dict._*_optim_state_dict",
        "saves and loads optimizers of shards",
        "torch 2.2",
        "an optimizer of shards is built",
    ),
    Patch(
        "torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint",
        "compiles recomputed units into one graph",
        "torch 2.8",
        "a model with such units is compiled",
        "it is compiled",
    ),
    Patch(
        "torch._dynamo.callback.callback_handler",
        "gives graphs of planned models plain tensors",
        "torch 2.3",
        ends="`torch._dynamo.reset()`",
    ),
    Patch(
        "torch.distributed.distributed_c10d._world.group_count",
        "creates groups that ranks outside of them do not count",
        "torch 2.1",
        "such a group is created",
        _BLOCK,
    ),
    Patch(
        "sys.excepthook",
        "tells ranks that wait for this one of an uncaught error",
        "Python 3",
        "a mesh is built, or a watch is opened",
        "the process ends, or the watch is closed",
    ),
    Patch(
        "torch.nn.utils.parametrize.*cache*",
        "keeps values of parametrized parameters for each thread",
        "torch 1.9",
        "ranks are threads",
        _BLOCK,
    ),
    Patch("gc.get_objects", "hides objects that other threads still build", "Python 3", "ranks are threads", _BLOCK),
    Patch("torch.distributed.distributed_c10d.ProcessGroup.*", "logs collectives", "torch 1.0", **_WATCH),
    Patch("torch.*.Work.wait", "finds threads that wait", "torch 1.0", **_WATCH),
    Patch("torch.distributed._functional_collectives.*", "logs collectives of DTensors", "torch 2.0", **_WATCH),
    Patch("*.load_balancing_loss_func", "counts tokens of all ranks in the load-balancing loss", "transformers 5.23"),
    Patch("peft.tuners.lora.layer._get_in_out_features", "gives adapters the full sizes of layers", _PEFT, _ADAPTED),
    Patch("peft.tuners.lora.layer.LoraLayer.*_init", _FULL_WEIGHTS, _PEFT, _ADAPTED),
    Patch("peft.tuners.lora.dora.DoraLinearLayer.update_layer", _FULL_WEIGHTS, _PEFT, _ADAPTED),
    Patch("peft.tuners.lora.model.LoraModel.add_weighted_adapter", _FULL_WEIGHTS, _PEFT, _ADAPTED),
    Patch(
        "peft.peft_model.PeftModel.get_prompt",
        "serves prompts of stages and local heads, and refuses later ones",
        _PEFT,
        _ADAPTED,
    ),
    Patch("peft.peft_model.PeftModel._setup_prompt_encoder", "refuses prompts around stages", _PEFT, _CUT),
    Patch("peft.tuners.tuners_utils._set_layer_requires_grad", "leaves out layers of other stages", _PEFT, _CUT),
    Patch(
        "peft.tuners.tuners_utils.BaseTuner.inject_adapter",
        "adapts layers of other stages and of shards",
        _PEFT,
        f"{_CUT}, or {_DATA}",
    ),
    Patch("peft.tuners.tuners_utils.BaseTuner.merge_adapter", _MERGED, _PEFT, _ADAPTED),
    Patch("peft.tuners.tuners_utils.BaseTuner._unload_and_optionally_merge", _MERGED, _PEFT, _ADAPTED),
    Patch("peft.tuners.*.check_adapters_to_merge", _MERGED, _PEFT, _ADAPTED),
    Patch("peft.tuners.tuners_utils.BaseTuner._inject_parameters", "adapts quantized experts", _PEFT, _QUANTIZED),
    Patch("peft.tuners.lora.layer.ParamWrapper._activate_lora", "adapts quantized experts", _PEFT, _QUANTIZED),
    Patch(
        "accelerate.accelerator.Accelerator.prepare_*",
        "refuses planned models, their loaders and schedules",
        "accelerate 1.15",
    ),
)


def row_of(target: str) -> Patch:
    """The row of a full name. Raises: LookupError for what no row has."""
    found = next((row for row in TABLE if fnmatchcase(target, row.target)), None)
    if found is None:
        raise LookupError(f"{target} has no row in parallelize/base/patches/table.py")
    return found
