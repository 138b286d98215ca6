"""Models of transformers with sharded sequences: their requirements, and hooks that act only inside the context."""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from accelerate.base._warn import warn_user
from accelerate.extensions.sequence.documents import Documents
from accelerate.extensions.sequence.region import WHAT, Active, Region
from accelerate.runtime import torch_private

# Heads that need the full sequence on one rank, for more than attention.
_WHOLE = ("ForSequenceClassification", "ForMultipleChoice", "ForQuestionAnswering", "ForNextSentencePrediction")
_SHIFTING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the models of transformers in a module that are not part of another: itself, or what adapters wrap."""
    if any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        yield model
        return
    for child in model.children():
        yield from outermost(child)


def check(model: nn.Module, axis: str) -> None:
    """Refuse (ValueError) a model that would compute something else on parts of a sequence. Not a collective."""
    what = WHAT[axis]
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise ValueError(
                f"{name or 'the model'} is a torch.nn.MultiheadAttention, which under {what} may attend within its shard. Write "
                "the attention with torch.nn.functional.scaled_dot_product_attention."
            )
    for inner in outermost(model):
        kind, config = type(inner).__name__, inner.config
        for part in inner.modules():
            used = getattr(getattr(part, "config", None), "_attn_implementation", None)
            if used not in (None, "sdpa"):
                raise ValueError(
                    f"{kind} was loaded with attn_implementation={used!r}, but {what} works through "
                    "torch.nn.functional.scaled_dot_product_attention only. Load it with attn_implementation='sdpa'."
                )
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        reason = None
        if getattr(config, "is_encoder_decoder", False):
            reason = f"is an encoder-decoder, whose two sequences {what} cannot cut"
        elif kind.endswith(_WHOLE):
            reason = "pools or compares tokens over the full sequence after attention, and a rank has a part"
        elif "position_ids" not in _parameters(inner):
            reason = "takes no position_ids in its forward, so positions would restart on every rank"
        elif kinds:
            reason = f"has layers of the kinds {sorted(kinds)}, which are local or recurrent along the sequence"
        if reason is not None:
            raise ValueError(f"{kind} {reason}. Use another model, or set {axis}_size=1.")


def join(model: nn.Module, region: Any) -> None:
    """Hook a model for evaluation to a region; one that cannot be exact is refused only once it is called in the region."""
    if not isinstance(region, Region):
        return
    try:
        check(model, region.axis)
    except ValueError as error:
        if not _hooked(model, OutsideHook, region):
            model.register_forward_pre_hook(OutsideHook(region, refusal=str(error)))
        return
    attach(model, region)


def is_causal(model: nn.Module) -> bool:
    """Return whether all attention of a model is causal, as its modules say by `is_causal`; without a word it is.

    Not a collective.
    """
    return all(getattr(module, "is_causal", True) for module in model.modules())


def attach(model: nn.Module, region: Region) -> None:
    """Register the hooks of a region on a model, and on the models of transformers in it, once each."""
    if not is_causal(model):
        region.cuts = 1  # nothing to balance: every token sees all others
    if not _hooked(model, OutsideHook, region):
        model.register_forward_pre_hook(OutsideHook(region))
    for inner in outermost(model):
        if _hooked(inner, ModelHook, region):
            continue
        # First of all hooks: those of strategies may move or cast the tensors checked here.
        inner.register_forward_pre_hook(ModelHook(region, inner), with_kwargs=True, prepend=True)
        for module in _attention_modules(inner):
            hook = AttentionHook(region, _parameters(module))
            module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def _attach_context_parallel_hooks(model: nn.Module) -> None:
    """Let each module named ``...self_attn`` of a model that makes its own context attend causally, without a mask."""
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(_causal_without_mask, with_kwargs=True, prepend=True)


def _causal_without_mask(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, kwargs | {"attention_mask": None, "is_causal": True} if "attention_mask" in kwargs else kwargs


def _refuse_recurrent_layers_under_sequence_parallelism(model: nn.Module) -> None:
    """Refuse (ValueError) a model whose configuration lists layers with a state along the sequence.

    Not a collective.
    """
    kinds = getattr(getattr(model, "config", None), "layer_types", None) or ()
    if recurrent := sorted({kind for kind in kinds if kind == "linear_attention"}):
        raise ValueError(
            f"{type(model).__name__} has layers of the kinds {recurrent}, whose state would start again on every rank that "
            "has a part of the sequence. Use a model with full attention, or set sp_size=1."
        )


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for name, module in model.named_modules()
        if (name.rpartition(".")[2] in _ATTENTION_NAMES or type(module).__name__.endswith("Attention"))
        and "attention_mask" in _parameters(module)
    ]


def _hooked(module: nn.Module, kind: type, region: Region) -> bool:
    return any(isinstance(hook, kind) and hook.region is region for hook in module._forward_pre_hooks.values())


def _parameters(module: nn.Module) -> tuple[str, ...]:
    # The class's: compilation and hooks of ours replace the instance's by something without a signature.
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
    return (*names, "**") if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters) else names


class OutsideHook:
    """Warns once of training outside the context, where every rank repeats the work; refuses calls inside it."""

    def __init__(self, region: Region, refusal: str | None = None) -> None:
        self.region = region
        self.refusal = refusal
        self.done = False

    def __call__(self, module: nn.Module, args: tuple) -> None:
        """Check only the first call in training; ValueError for a refused call inside the context."""
        if self.region.active is not None and self.refusal:
            raise ValueError(f"{self.refusal} Or call it outside of maybe_context_parallel, on unsharded sequences.")
        if self.done or not (module.training and torch.is_grad_enabled()):
            return
        self.done = True
        if self.region.active is None:
            warn_user(
                f"{type(module).__name__} is trained outside `with accelerator.maybe_context_parallel(...)`, although "
                f"{self.region.axis}_size={self.region.size}: each rank does all work, and nothing is saved. Call it inside."
            )


class AttentionHook:
    """Takes the mask from an attention module: it was made from a part of the sequence, and causality is the region's to see to."""

    def __init__(self, region: Region, parameters: tuple[str, ...]) -> None:
        self.region = region
        self.parameters = parameters

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Change the arguments of `forward`, inside the context."""
        if self.region.active is None:
            return None
        kwargs["attention_mask"] = None
        place = self.parameters.index("attention_mask")
        if place < len(args):
            args = (*args[:place], None, *args[place + 1 :])
            del kwargs["attention_mask"]
        if getattr(module, "is_causal", False) and {"is_causal", "**"} & set(self.parameters):
            # Said outright: a shard of one token would otherwise pass for generation, which needs no mask.
            kwargs["is_causal"] = True
        return args, kwargs


class ModelHook:
    """Refuses, inside the context, arguments that are wrong on a part of a sequence, and supplies positions."""

    def __init__(self, region: Region, model: nn.Module) -> None:
        config, self.region, self.name = model.config, region, type(model).__name__
        padded = any(
            isinstance(module, nn.Embedding) and module.padding_idx is not None and "position" in name
            for name, module in model.named_modules()
        )
        slides = getattr(config, "use_sliding_window", True) and "sliding_attention" in (
            getattr(config, "layer_types", None) or ("sliding_attention",)
        )
        self.parameters = _parameters(model)
        self.shifts = self.name.endswith(_SHIFTING)
        self.numbers_from_zero = not padded and not self.name.endswith("ForConditionalGeneration")
        self.window = getattr(config, "sliding_window", None) if slides else None
        self.causal = is_causal(model)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Change the arguments of `forward`, inside the context; ValueError if they are wrong on a part."""
        active = self.region.active
        if active is None:
            return None
        kwargs = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        if active.length is not None:
            self._check_lengths(active, kwargs)
        self._check_labels(kwargs)
        active.separate(self._check_places(active, kwargs), self.name)
        self._check_window(active)
        # Dropped: it is right-padding at most, which causal attention needs no mask for.
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = None
        return (), kwargs

    def _check_lengths(self, active: Active, kwargs: dict[str, Any]) -> None:
        share = active.length // self.region.size
        for name in ("input_ids", "inputs_embeds", "position_ids", "labels", "shift_labels"):
            tensor = kwargs.get(name)
            if tensor is None:
                continue
            length = tensor.shape[1] if name == "inputs_embeds" else tensor.shape[-1]
            if length != share:
                raise ValueError(
                    f"{name} of shape {tuple(tensor.shape)} has {length} tokens, but under {self.region.what} this rank has "
                    f"{active.length} / {self.region.size} = {share}. Name {name} in the buffers of maybe_context_parallel."
                )

    def _check_window(self, active: Active) -> None:
        length = active.length if active.documents is None else active.documents.longest
        if self.window is not None and (length or 0) > self.window:
            raise ValueError(
                f"{self.name} has a sliding window of {self.window} tokens, and the sequence has {length}; "
                f"{self.region.what} has no mask for the window. Cut sequences to {self.window} tokens, or set sliding_window=None."
            )

    def _check_labels(self, kwargs: dict[str, Any]) -> None:
        if self.shifts and kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            raise ValueError(
                f"{self.name} was called with labels= under {self.region.what}, and would lose the last label of every part. Shift "
                "the unsharded labels before the context, `shifted = accelerate.utils.shift_labels(labels)`, name `shifted` in its "
                "buffers, and pass labels=shifted, shift_labels=shifted; or compute the loss from the logits."
            )

    def _check_places(self, active: Active, kwargs: dict[str, Any]) -> Documents | None:
        """Supply positions, or check given positions or a mask with all ranks. Return the documents, if rows are packed."""
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if positions is None:
            if active.positions is None or not self.numbers_from_zero:
                raise ValueError(
                    f"{self.name} was called without position_ids under {self.region.what}, and would count from 0 on every rank. "
                    "Make position_ids for the full sequence, name them in the buffers, and pass them to the model."
                )
            kwargs["position_ids"] = active.positions
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2 or active.positions is None):
            seen = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"{self.name} was called with an attention_mask of {seen} under {self.region.what}. A mask of rows and columns "
                "cannot be given there: omit it, or give a mask of [batch, length] that pads at the right, with buffers."
            )
        # Positions of several axes (images) are the model's own.
        if active.positions is None or (positions is not None and positions.dim() > 2 and not self.numbers_from_zero):
            positions = None
        return None if mask is None and positions is None else self._compare(active, mask, positions)

    @torch.compiler.disable  # what follows waits for the device
    def _compare(self, active: Active, mask: Tensor | None, ids: Tensor | None) -> Documents | None:
        """Check a mask and positions on all ranks in one message and one wait for the device; return the documents, if packed."""
        named = ids is None or (ids.dim() < 3 and active.has(ids))
        rows = [active.positions, active.positions if ids is None else ids[0] if ids.dim() > 2 else ids]
        rows.append(torch.ones_like(rows[0]) if mask is None else mask)
        if rows[2].shape[-1] == active.length != rows[0].shape[-1]:  # the mask is unsharded
            rows[2] = rows[2][:, active.positions[0]]
        rows.append(torch.full_like(active.positions, not named))
        local_places = torch.stack(torch.broadcast_tensors(*(row.to(torch.int32) for row in rows)))
        parts = [torch.empty_like(local_places) for _ in range(self.region.size)]
        distributed.all_gather(parts, local_places, group=self.region.group)
        # A simulated run, or tensors without values, have nothing of other ranks.
        if torch_private.is_fake(self.region.group) or torch_private.is_shape(local_places):
            return None
        gathered = torch.cat(parts, dim=-1)
        whole = gathered.cpu().numpy()
        order = whole[0, 0].argsort()
        places, positions, real, unnamed = whole[..., order]
        real = real != 0
        if ((real != (places < real.sum(axis=-1, keepdims=True))).any()) if self.causal else not real.all():
            # If every token sees all others, padding anywhere would be seen.
            raise ValueError(
                f"attention_mask of {self.name} has padding that {self.region.what} cannot mask: only padding at the right "
                "(padding_side='right' of the tokenizer) of causal attention needs no mask, and this is padding before real tokens "
                f"or attention that is not causal (causal: {self.causal}). Pad at the right, or use sequences without padding."
            )
        if self.numbers_from_zero and unnamed.any() and ((positions != places) & real).any():
            raise ValueError(
                f"position_ids are not 0, 1, 2, ... over the full sequence ({active.length} tokens). If they were made for a part, "
                "name unsharded ones in the buffers, or none; name those of packed documents there, too, and pass the same tensor."
            )
        if not ((np.diff(positions) != 1) & real[:, 1:]).any():
            return None
        if mask is not None:
            raise ValueError(
                f"{self.name} was called with an attention_mask and position_ids of packed documents (they start again within a row). "
                "Omit attention_mask: position_ids separate the documents."
            )
        ordered, size = bool((np.diff(order) == 1).all()), self.region.size
        local_places = places[0] if self.region.axis == "sp" else np.split(whole[0, 0], size)[self.region.rank]
        return Documents.find(positions, local_places, None if ordered else gathered[0, 0].argsort())
