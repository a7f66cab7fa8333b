"""Quantised checkpoints of others: read and written in a form that the kernels run, or refused by
name.

Tensors of any type are read as numpy arrays.

Integers with a scale for whole groups of 32 inputs stay as they are; everything else is rounded to
a chosen width.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeshard.architectures import STORED_AS, check_names, name_of_experts, parse_config
from edgeshard.architectures.tensors import canonical_name, expected_tensors, is_run
from edgeshard.domain.errors import DataLossError, UnsupportedModelError
from edgeshard.domain.models.dtypes import IntegerFormat, Quantisation
from edgeshard.importing import packings
from edgeshard.importing.blocks import (
    BYTES,
    Floats,
    Integers,
    TensorWriter,
    Width,
    dequantised,
    fits_zeros,
    from_bfloat16,
    kept_scales,
)
from edgeshard.importing.imported import CONVERTING, Imported, Progress, size_notes
from edgeshard.importing.packings import Matrix, malformed
from edgeshard.importing.stored_as import may_be_integers, whole_matrices, with_stored
from edgeshard.storage.checkpoint import (
    Checkpoint,
    StoredFile,
    StoredTensor,
    experts_apart,
    read_config,
    stored_tensors,
)
from edgeshard.storage.model_directory import ModelDirectory, open_regular

_PLAIN = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1",
}  # fmt: skip


def read_array(tensor: StoredTensor) -> NDArray[Any]:
    """The tensor's numbers, of its shape. Floats are read as float32, integers as they are, F8_E8M0
    as bytes.

    Raises DataLossError naming the tensor if its file ends too early.
    """
    with open_regular(tensor.file) as file:
        file.seek(tensor.offset)
        data = file.read(tensor.size)
    if len(data) != tensor.size:
        raise DataLossError(
            f"{tensor.file.name} ends before the end of {tensor.name}", field=tensor.name
        )
    kind = tensor.stored_dtype
    if kind == "BF16":
        return from_bfloat16(np.frombuffer(data, "<u2")).reshape(tensor.shape)
    if kind == "F8_E4M3":
        return _E4M3[np.frombuffer(data, np.uint8)].reshape(tensor.shape)
    if kind == "F8_E5M2":  # the upper half of a float16
        halves = np.frombuffer(data, np.uint8).astype(np.uint16) << 8
        return halves.view(np.float16).astype(np.float32).reshape(tensor.shape)
    numbers = np.frombuffer(data, _PLAIN.get(kind, "u1")).reshape(tensor.shape)
    return numbers.astype(np.float32) if kind in ("F16", "F64") else numbers


def _e4m3() -> Floats:
    """The 256 numbers of eight bits with four of exponent and three of fraction, without
    infinities, by their bits."""
    bits = np.arange(256, dtype=np.int32)
    exponent, fraction = (bits >> 3) & 15, (bits & 7) / 8
    magnitude = np.where(
        exponent == 0, fraction * 2.0**-6, (1 + fraction) * np.exp2(exponent - 7.0)
    )
    magnitude[(bits & 127) == 127] = np.nan
    return np.where(bits < 128, magnitude, -magnitude).astype(np.float32)


_E4M3 = _e4m3()


_KEYS = ("quantization_config", "compression_config")
_METHODS = ("compressed-tensors", "awq", "gptq", "fp8", "fbgemm_fp8", "mxfp4", "modelopt")
_SCALES = frozenset({"weight_scale", "weight_scale_inv"})
_PARTS = _SCALES.union(
    (
        "weight_packed",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "weight_global_scale",
        "weight_scale_2",
    ),
    ("qweight", "qzeros", "scales", "g_idx"),
)
# Scales of activations and of the KV cache, which EdgeShard rounds in its own way.
_NOT_WEIGHTS = frozenset(
    {
        "activation_scale",
        "input_scale",
        "output_scale",
        "input_zero_point",
        "input_global_scale",
        "input_scale_ub",
    }
    | {"q_scale", "k_scale", "v_scale"}
)
_JOINED_NOT_WEIGHTS = ("_proj_activation_scale", "_proj_input_scale")
"""Ends of the same of joined experts, as in gate_up_proj_activation_scale."""
_MLX_KEYS = ("quantization", "quantization_config")
_MLX_SETTINGS = frozenset({"group_size", "bits"})
_MLX_PARTS = frozenset({"weight", "scales", "biases"})
_BITSANDBYTES_ENDS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB")
_BITSANDBYTES_STATE = ".quant_state.bitsandbytes__"
_EXPERTS = ("_blocks", "_scales")
Parts = dict[str, StoredTensor]


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The settings in config.json by which its weights were quantised; None if they were not."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        for key in _KEYS:
            if isinstance(part.get(key), Mapping) and part[key]:
                return dict(part[key])
    return None


def checked_quantisation(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The same. Raises UnsupportedModelError, by name, for weights that are quantised in a way that
    is not read."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        for key in _MLX_KEYS:
            settings = part.get(key)
            if (
                isinstance(settings, Mapping)
                and "quant_method" not in settings
                and settings.keys() >= _MLX_SETTINGS
            ):
                raise _refused(f"{key} is of MLX, whose quantised weights are not read")
    quantisation = quantisation_of(config)
    if quantisation is not None:
        check_method(quantisation)
    return quantisation


def check_layout(names: Collection[str]) -> None:
    """Raise UnsupportedModelError, by name, for tensors that MLX or bitsandbytes quantised.

    `names` are those of all tensors of a checkpoint. Its config.json may have no settings of such
    weights.
    """
    for name in names:
        if name.endswith(_BITSANDBYTES_ENDS) or _BITSANDBYTES_STATE in name:
            raise _unread_layout(name, "bitsandbytes")
        stem, _, leaf = name.rpartition(".")
        if leaf == "biases" and all(f"{stem}.{part}" in names for part in _MLX_PARTS):
            raise _unread_layout(name, "MLX")


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model with whole weights."""
    plain = {key: value for key, value in config.items() if key not in _KEYS}
    if isinstance(nested := plain.get("text_config"), Mapping):
        plain["text_config"] = {key: value for key, value in nested.items() if key not in _KEYS}
    return plain


def open_quantised(
    directory: Path, files: tuple[StoredFile, ...], scratch: Path, width: Width, progress: Progress
) -> Imported:
    """The checkpoint of a directory whose config.json has the settings of quantised weights;
    `files` go with it.

    Raises UnsupportedModelError for a method that is not read, and as `open_checkpoint` and
    `check_names` do, before anything is converted.
    """
    model = ModelDirectory.at(directory)
    config = read_config(directory)
    settings = checked_quantisation(config)
    assert settings is not None
    plain = without_quantisation(config)
    architecture = parse_config(plain).architecture
    notes: list[str] = []
    tensors = stored_tensors(model, notes, plain)
    check_layout({tensor.name for tensor in tensors})
    whole, modules = sorted_parts(experts_apart(plain, tensors))
    used_tensors = [tensor for tensor in whole if is_run(architecture, tensor.name, plain)]
    left_out = [tensor for tensor in whole if not is_run(architecture, tensor.name, plain)]
    for module in [module for module in modules if not is_run(architecture, module, plain)]:
        left_out += modules.pop(module).values()
    check_names(plain, [*(tensor.name for tensor in used_tensors), *modules])
    total, read = sum(part.size for parts in modules.values() for part in parts.values()), 0
    read_bytes = total + sum(tensor.size for tensor in used_tensors)
    with TensorWriter(scratch, _least_bytes(architecture, plain, modules)) as writer:
        converter = Converter(plain, check_method(settings), settings, width, writer)
        for module, parts in modules.items():
            progress(CONVERTING, read, total)
            used_tensors.append(converter.stored(module, parts))
            read += sum(part.size for part in parts.values())
    notes += converter.notes()
    notes += size_notes(read_bytes, used_tensors)
    count = whole_matrices(plain, used_tensors)
    plain = with_stored(plain, used_tensors)
    if STORED_AS in plain and count:
        notes.append(
            f"{count} matrices of its blocks are not quantised; they run as "
            f"{Quantisation(plain[STORED_AS]).blocks} "
            "too, unless it is deployed with --quantise none"
        )
    checkpoint = Checkpoint(
        model.root, json.dumps(plain, sort_keys=True), (*used_tensors, *left_out), files
    )
    return Imported(checkpoint, tuple(notes))


def _least_bytes(architecture: str, config: Mapping[str, Any], modules: Iterable[str]) -> int:
    """The bytes of the converted modules in the narrowest form; those of an unexpected name are not
    counted."""
    expected = expected_tensors(config)
    weights = 0
    for module in modules:
        tensor = expected.get(canonical_name(architecture, f"{module}.weight"))
        weights += 0 if tensor is None else math.prod(tensor.shape)
    return int(weights * BYTES[Width.INT4])


def check_method(settings: Mapping[str, Any]) -> str:
    """The method by which the weights were quantised. Raises UnsupportedModelError, by name, for
    others."""
    method = settings.get("quant_method") or _unnamed_method(settings)
    if method not in _METHODS:
        raise _refused(
            f"quant_method {str(method)[:40]!r} is not read; EdgeShard reads {', '.join(_METHODS)}"
        )
    if method == "awq" and (
        settings.get("version", "gemm") != "gemm" or settings.get("bits", 4) != 4
    ):
        raise _refused("AWQ is read as version gemm with 4 bits only")
    algorithm = str(settings.get("quant_algo", ""))
    if method == "modelopt" and ("AWQ" in algorithm or "SVD" in algorithm):
        raise _refused(
            f"quant_algo {algorithm[:40]!r} changes activations while the model runs, which is not "
            "done"
        )
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") not in ("dense", None):
        raise _refused(f"sparsity_config.format {str(sparsity['format'])[:40]!r} is not read")
    if settings.get("transform_config"):
        raise _refused("transform_config turns activations while the model runs, which is not done")
    return str(method)


def _unnamed_method(settings: Mapping[str, Any]) -> str:
    """The method of settings without a quant_method, as older programs wrote them; "" if
    unknown."""
    if settings.get("config_groups"):
        return "compressed-tensors"
    return "bitsandbytes" if any(key.startswith("load_in_") for key in settings) else ""


def sorted_parts(tensors: tuple[StoredTensor, ...]) -> tuple[list[StoredTensor], dict[str, Parts]]:
    """The whole tensors, and the parts of quantised weights by the weight's name and the end of
    their own."""
    modules: defaultdict[str, Parts] = defaultdict(dict)
    whole: dict[str, StoredTensor] = {}
    for tensor in tensors:
        module, _, leaf = tensor.name.rpartition(".")
        if leaf in _PARTS:
            modules[f"{module}.weight"][leaf] = tensor
        elif (end := leaf[-7:]) in _EXPERTS and tensor.stored_dtype == "U8":
            modules[tensor.name.removesuffix(end)][end] = tensor
        elif leaf not in _NOT_WEIGHTS and not leaf.endswith(_JOINED_NOT_WEIGHTS):
            whole[tensor.name] = tensor
    for name in list(modules):
        if name in whole:
            modules[name]["weight"] = whole.pop(name)
    return list(whole.values()), dict(modules)


@dataclass(slots=True)
class Converter:
    """A reader of weights from their parts; `config` is the one of the model with whole weights."""

    config: Mapping[str, Any]
    method: str
    settings: Mapping[str, Any]
    width: Width
    writer: TensorWriter

    def stored(self, name: str, parts: Parts) -> StoredTensor:
        """The place of a weight that was read from `parts` and written anew.

        Raises InvalidArgumentError naming the tensor if its parts contradict one another.
        """
        try:
            return self._stored(name, parts)
        except (ArithmeticError, IndexError, KeyError, TypeError, ValueError) as error:
            # Shapes and types are a stranger's, in more combinations than could be looked for one
            # by one.
            kind = type(error).__name__
            raise malformed(
                name, f"has parts whose shapes or types contradict one another ({kind})"
            ) from None

    def _stored(self, name: str, parts: Parts) -> StoredTensor:
        arrays = {key: read_array(part) for key, part in parts.items()}
        if "_blocks" in parts:
            return self._expert(name, arrays)
        matrix = self._matrix(name, parts, arrays)
        scales = None if matrix.values is None else kept_scales(matrix.scales)
        if matrix.values is None or scales is None:
            numbers = (
                matrix.scales
                if matrix.values is None
                else dequantised(matrix.values, matrix.scales)
            )
            _check_finite(name, numbers)
            fits = self.width.integers is None or may_be_integers(
                parse_config(self.config), name, 2
            )
            width = self.width if fits else Width.BFLOAT16
            return self.writer.rounded(name, numbers.shape, iter([numbers]), width)
        if not np.array_equal(scales, matrix.scales):
            self.writer.loss.add(
                dequantised(matrix.values, matrix.scales), dequantised(matrix.values, scales)
            )
        integers = self._narrowest(name, matrix.values)
        return self.writer.integers(
            name, matrix.values.shape, iter([(matrix.values, scales)]), integers
        )

    def _narrowest(self, name: str, values: Integers) -> IntegerFormat:
        """The format of least bytes that holds these values.

        Experts of a layer have one format: it depends on whether the checkpoint has zero points,
        not on the values of one of them.
        """
        has_zeros = _has_zero_points(self.method, self.settings)
        low, high = int(values.min(initial=0)), int(values.max(initial=0))
        if low >= -8 and high <= 7 and not has_zeros:
            return IntegerFormat.INT4
        is_expert = name_of_experts(name) != name
        if (has_zeros or not is_expert) and fits_zeros(values):
            return IntegerFormat.INT4_ZEROS
        return IntegerFormat.INT8

    def _matrix(self, name: str, parts: Parts, arrays: dict[str, NDArray[Any]]) -> Matrix:
        if "qweight" in parts:
            if not {"qzeros", "scales"} <= parts.keys() or self.method not in ("awq", "gptq"):
                raise _refused(
                    f"tensor {name} is packed in a way that {self.method} does not explain"
                )
            # GPTQ's first format stored each zero point less one.
            zero_offset = 0 if self.settings.get("checkpoint_format") == "gptq_v2" else 1
            read = packings.awq if self.method == "awq" else packings.gptq(zero_offset)
            return read(name, arrays)
        if "weight_packed" in parts and "weight_scale" in parts:
            if parts["weight_packed"].stored_dtype == "I32":
                return packings.packed(name, arrays)
            if parts["weight_scale"].stored_dtype in ("U8", "F8_E8M0"):
                return packings.mxfp4(name, arrays)
            if "weight_global_scale" in parts:
                return packings.nvfp4(name, arrays)
            raise _refused(f"tensor {name} is of a format of 4-bit floats that is not read")
        dtype = parts["weight"].stored_dtype if "weight" in parts else ""
        if dtype == "U8" and {"weight_scale", "weight_scale_2"} <= parts.keys():
            return packings.nvfp4(name, arrays)
        if dtype == "I8" and "weight_scale" in parts:
            return packings.integers(name, arrays)
        if dtype.startswith("F8_E") and _SCALES & parts.keys():
            return packings.floats(self._block())(name, arrays)
        raise _refused(f"tensor {name} is stored as {', '.join(sorted(parts))}, which is not read")

    def _block(self) -> tuple[int, int] | None:
        """The (rows, columns) that share a scale of FP8, if config.json has one."""
        # a name that says the size
        if str(self.settings.get("quant_algo", "")).upper() == "FP8_PB_WO":
            return 128, 128
        groups = self.settings.get("config_groups")
        block_size = self.settings.get("weight_block_size")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            block_size = block_size or (
                weights.get("block_structure") if isinstance(weights, Mapping) else None
            )
        if block_size is None:
            return None
        if (
            not isinstance(block_size, list)
            or len(block_size) != 2
            or not all(type(size) is int and size > 0 for size in block_size)
        ):
            raise _refused("weight_block_size is not a pair of sizes")
        return block_size[0], block_size[1]

    def _expert(self, name: str, arrays: dict[str, NDArray[Any]]) -> StoredTensor:
        """The matrix of an expert in MXFP4, [outputs, inputs]: the same numbers as int8, or where
        float16 does not hold a scale as floats, [inputs, outputs]."""
        if arrays.keys() != {"_blocks", "_scales"} or arrays["_blocks"].ndim < 2:
            raise _refused(
                f"tensor {name} is stored as {', '.join(sorted(arrays))}, which is not read"
            )
        matrix = packings.mxfp4(name, arrays)
        assert matrix.values is not None
        used = matrix.values.reshape(*matrix.scales.shape, -1).any(-1)
        scales = kept_scales(np.where(used, matrix.scales, np.float32(0)))
        if scales is not None:
            return self.writer.integers(
                name, matrix.values.shape, iter([(matrix.values, scales)]), IntegerFormat.INT8
            )
        with np.errstate(over="ignore"):  # told by name
            numbers = dequantised(matrix.values, matrix.scales).T
        _check_finite(name, numbers)
        return self.writer.rounded(name, numbers.shape, iter([numbers]), Width.BFLOAT16)

    def notes(self) -> list[str]:
        loss = self.writer.loss
        if not loss.errors:
            return []
        return [
            f"{self.method} became {self.width}, because EdgeShard has no exact format for it: "
            f"{loss}"
        ]


def _has_zero_points(method: str, settings: Mapping[str, Any]) -> bool:
    """Whether the settings call for zero points, which then are any integers."""
    if method == "awq":
        return settings.get("zero_point") is not False
    if method == "gptq":
        return settings.get("sym") is False
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("symmetric") is False:
            return True
    return False


def _check_finite(name: str, numbers: Floats) -> None:
    if not np.isfinite(numbers).all():
        raise malformed(name, "has weights that are no numbers")


def _unread_layout(name: str, program: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"tensor {name} is of weights that {program} quantised, which are not read; use the "
        "checkpoint that is not "
        "quantised, or a GGUF file of it",
        field=name,
        reason="UNSUPPORTED_QUANTISATION",
    )


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config.json: {what}; use the checkpoint that is not quantised, or a GGUF file of it",
        field="quantization_config",
        reason="UNSUPPORTED_QUANTISATION",
    )
