"""The numbers of blocks in llama.cpp's formats, from their bytes in the store.

Layouts: ggml-common.h of https://github.com/ggml-org/llama.cpp. Numbers are computed in float32 in
the order in which the `gguf` package does it, so that they are equal bit for bit. It does not read
Q1_0 and Q2_0, which follow ggml-quants.c.

The weights of a grid format are places in a list of short vectors. A vector's values are digits of
an integer, the first one the lowest. The integers of a table ascend, and its text has their
differences, 16 bits each, compressed.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from edgeshard.domain.models.dtypes import IntegerFormat


def _half(data: torch.Tensor) -> torch.Tensor:
    """The float16 in two bytes [n, 2], as float32 [n, 1]."""
    return _dense(data).view(torch.float16).float()


def _dense(data: torch.Tensor) -> torch.Tensor:
    """A copy without gaps between the rows. torch takes a single row for contiguous whatever its
    stride is, and refuses to view an odd stride as a wider type."""
    return data.clone(memory_format=torch.contiguous_format)


def scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 6-bit scales and minima, both [n, 8] uint8, in the 12 bytes [n, 12] of Q4_K and Q5_K."""
    low = packed[:, :4]
    middle = packed[:, 4:8]
    high = packed[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), 1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), 1)
    return scales, minima


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The 4-bit values [n, 8, 32] uint8 in 128 bytes [n, 128]: those of two groups share 32 bytes,
    the lower first."""
    pairs = packed.view(-1, 4, 1, 32)
    return torch.cat((pairs & 15, pairs >> 4), 2).view(-1, 8, 32)


def values_of_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """The 5-bit values [n, 8, 32] uint8 of blocks [n, 176]: the highest bits of group g are bit g
    of 32 bytes."""
    bits = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = (blocks[:, None, 16:48] >> bits) & 1
    return nibbles(blocks[:, 48:].contiguous()) | (high << 4)


def values_of_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """The 6-bit values [n, 256] uint8 of blocks [n, 210]: halves of 128, in each four quarters of
    32."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), 2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    return (low | (high << 4)).view(-1, 256)


def _with_minima(blocks: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[n, 256] from values [n, 8, 32] and the 16 bytes that begin a block of Q4_K and of Q5_K."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    by_group = (_half(blocks[:, :2]) * scales.float()).unsqueeze(-1)
    offsets = (_half(blocks[:, 2:4]) * minima.float()).unsqueeze(-1)
    return (by_group * values.float() - offsets).view(-1, 256)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_minima(blocks, nibbles(blocks[:, 16:].contiguous()))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_minima(blocks, values_of_q5_k(blocks))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    values = values_of_q6_k(blocks).to(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    by_group = (_half(blocks[:, 208:]) * scales.float()).unsqueeze(-1)
    return (by_group * values.view(-1, 16, 16).float()).view(-1, 256)


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values that 4 bits of IQ4_XS and IQ4_NL stand for."""


def scales_of_iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """The 6-bit scales [n, 8] uint8, 32 too large: their high bits are two bytes, their low ones
    nibbles of four."""
    high = blocks[:, 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1)
    return low.flatten(1) | ((high.flatten(1) & 3) << 4)


def codes_of_iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """The places in `LEVELS` [n, 8, 32] uint8: 16 bytes for each group, the first half in their low
    nibbles."""
    pairs = blocks[:, 8:].reshape(-1, 8, 16)
    return torch.cat((pairs & 15, pairs >> 4), -1)


def levels(codes: torch.Tensor) -> torch.Tensor:
    """The values of codes of any shape, float32."""
    return torch.tensor(LEVELS, dtype=torch.float32)[codes.long()]


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    by_group = _half(blocks[:, :2]) * (scales_of_iq4_xs(blocks).to(torch.int8) - 32).float()
    return (by_group.unsqueeze(-1) * levels(codes_of_iq4_xs(blocks))).view(-1, 256)


def _shifted(packed: torch.Tensor, shifts: tuple[int, ...]) -> torch.Tensor:
    """[n, shifts, ...]: integers [n, ...] of any type, shifted to the right by each."""
    counts = torch.tensor(shifts, dtype=packed.dtype).view(1, -1, *(1 for _ in packed.shape[1:]))
    return packed.unsqueeze(1) >> counts


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """The 4-bit values [n, 32] in 16 bytes [n, 16]: the first half of them in the low nibbles."""
    return torch.cat((packed & 15, packed >> 4), 1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bit 4 of 32 values [n, 32], from the bits of 4 bytes [n, 4] in order."""
    return (_bits(packed) << 4).to(torch.uint8)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """The bits of bytes [n, bytes] in order, the lowest first: [n, 8 * bytes]."""
    return (_shifted(packed, tuple(range(8))) & 1).transpose(1, 2).flatten(1)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits [n, words] int64 in bytes [n, 4 * words]."""
    return _dense(data).view(torch.int32).long() & 0xFFFFFFFF


def _shorts(data: torch.Tensor) -> torch.Tensor:
    """Words of 16 bits [n, words] int64 in bytes [n, 2 * words]."""
    return _dense(data).view(torch.int16).long() & 0xFFFF


def _grouped(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values [n, ...] times the scale of each group [n, groups]: [n, inputs]."""
    grouped = values.reshape(*scales.shape, -1).float()
    return (scales.unsqueeze(-1) * grouped).flatten(1)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks[:, :2]) * _halves(blocks[:, 4:]).float() + _half(blocks[:, 2:4])


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    values = _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks[:, :2]) * (values.to(torch.int8) - 16).float()


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    values = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks[:, :2]) * values.float() + _half(blocks[:, 2:4])


def _int4_zeros(blocks: torch.Tensor) -> torch.Tensor:
    values = _halves(blocks[:, 3:]).float() - blocks[:, 2:3].float()
    return _half(blocks[:, :2]) * values


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """The 2-bit values [n, 256] in 64 bytes [n, 64]: halves of 128, in each four quarters of 32."""
    return (_shifted(packed.reshape(-1, 32), (0, 2, 4, 6)) & 3).view(-1, 256)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _half(blocks[:, 80:82]) * (blocks[:, :16] & 15).float()
    minima = _half(blocks[:, 82:84]) * (blocks[:, :16] >> 4).float()
    values = _two_bits(blocks[:, 16:80]).view(-1, 16, 16).float()
    return (scales.unsqueeze(-1) * values - minima.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _shifted(blocks[:, 96:104], (0, 4)).flatten(1) & 15
    high = _shifted(blocks[:, 104:108], (0, 2, 4, 6)).flatten(1) & 3
    scales = ((low | (high << 4)).to(torch.int8) - 32).float()
    above = (_shifted(blocks[:, :32], tuple(range(8))) & 1).flatten(1)
    values = (_two_bits(blocks[:, 32:96]) | (above << 2)).to(torch.int8) - 4
    return _grouped(_half(blocks[:, 108:]) * scales, values)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks[:, :2]) * levels(_halves(blocks[:, 2:]))


TWICE_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of E2M1."""


def _fp4(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(TWICE_FP4, dtype=torch.float32)[codes.long()]


@cache
def scales_of_bytes(kind: IntegerFormat) -> torch.Tensor:
    """The scale [256] float32 that each byte stands for: E8M0 of MXFP4, E4M3 without sign of NVFP4,
    both halved."""
    exact = torch.arange(256, dtype=torch.float64)
    if kind is IntegerFormat.MXFP4:
        return (2.0 ** (exact - 128)).float()
    exponents, fractions = exact // 8 % 16, exact % 8
    small, normal = fractions * 2.0**-9, (1 + fractions / 8) * 2.0 ** (exponents - 7)
    scales = torch.where(exponents == 0, small, normal) / 2
    scales[127] = 0.0
    return scales.float()


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    scales = scales_of_bytes(IntegerFormat.MXFP4)[blocks[:, :1].long()]
    return scales * _fp4(_halves(blocks[:, 1:]))


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    scales = scales_of_bytes(IntegerFormat.NVFP4)[blocks[:, :4].long()]
    packed = blocks[:, 4:].reshape(-1, 8)
    return _grouped(scales, _fp4(_halves(packed)).view(-1, 64))


def _q1_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks[:, :2]) * (2 * _bits(blocks[:, 2:]).float() - 1)


def _q2_0(blocks: torch.Tensor) -> torch.Tensor:
    values = (_shifted(blocks[:, 2:], (0, 2, 4, 6)) & 3).transpose(1, 2).flatten(1)
    return (values.float() - 1) * _half(blocks[:, :2])


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks[:, 64:]) * (_two_bits(blocks[:, :64]).float() - 1)


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    powers = torch.tensor((1, 3, 9, 27, 81), dtype=torch.uint8).view(1, -1, 1)
    parts = (
        blocks[:, None, :32] * powers,
        blocks[:, None, 32:48] * powers,
        blocks[:, None, 48:52] * powers[:, :4],
    )
    products = torch.cat([part.flatten(1) for part in parts], 1)
    values = (products.short() * 3 >> 8).float() - 1
    return _half(blocks[:, 52:]) * values


def _signs(packed: torch.Tensor) -> torch.Tensor:
    """1 or -1 float32 [n, 8 * bytes] from bits in bytes [n, bytes]."""
    return 1 - 2 * _bits(packed).float()


def _with_parity(signs: torch.Tensor) -> torch.Tensor:
    """The eight bits of signs of which 7 [n, k] are stored: each byte gets an even number of
    ones."""
    parity = signs ^ (signs >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return (signs | (parity << 7)).to(torch.uint8)


def _on_grid(
    kind: IntegerFormat, scales: torch.Tensor, places: torch.Tensor, signs: torch.Tensor
) -> torch.Tensor:
    """Numbers [n, 256] from scales [n, groups], places in the grid [n, vectors] and bytes of signs
    [n, 32]."""
    vectors = grid_of(kind)[places]
    grouped = _grouped(scales, vectors)
    return grouped * _signs(signs)


def _nibbles_in_order(packed: torch.Tensor) -> torch.Tensor:
    """The 4-bit values [n, 2 * bytes] in bytes [n, bytes], the low one of each first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def _seven_bits(words: torch.Tensor) -> torch.Tensor:
    """The four fields of 7 bits of words [n, words]: [n, 4 * words]."""
    return (_shifted(words, (0, 7, 14, 21)) & 127).transpose(1, 2).flatten(1)


def _iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    places = blocks[:, 2:66].long() | (_bits(blocks[:, 66:74]).long() << 8)
    scales = _half(blocks[:, :2]) * (1 + 2 * _nibbles_in_order(blocks[:, 106:])).float()
    return _on_grid(IntegerFormat.IQ3_S, scales, places, blocks[:, 74:106])


def _iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    words = _words(blocks[:, 66:])
    scales = _half(blocks[:, :2]) * (0.5 + (words >> 28).float()) * 0.5
    signs = _with_parity(_seven_bits(words))
    return _on_grid(IntegerFormat.IQ3_XXS, scales, blocks[:, 2:66].long(), signs)


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    pairs = blocks[:, 2:].reshape(-1, 8, 2, 4)
    words = _words(pairs[:, :, 1].flatten(1))
    scales = _half(blocks[:, :2]) * (0.5 + (words >> 28).float()) * 0.25
    signs = _with_parity(_seven_bits(words))
    return _on_grid(IntegerFormat.IQ2_XXS, scales, pairs[:, :, 0].flatten(1).long(), signs)


def _iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    shorts = _shorts(blocks[:, 2:66])
    scales = _half(blocks[:, :2]) * (0.5 + _nibbles_in_order(blocks[:, 66:]).float()) * 0.25
    return _on_grid(IntegerFormat.IQ2_XS, scales, shorts & 511, _with_parity(shorts >> 9))


def _iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    above = (_shifted(blocks[:, 66:74], (0, 2, 4, 6)) & 3).transpose(1, 2).flatten(1)
    places = blocks[:, 2:34].long() | (above.long() << 8)
    scales = _half(blocks[:, :2]) * (0.5 + _nibbles_in_order(blocks[:, 74:]).float()) * 0.25
    return _on_grid(IntegerFormat.IQ2_S, scales, places, blocks[:, 34:66])


_SHIFT = 0.125
"""A distance of all values of a vector of IQ1_S and IQ1_M from the grid."""


def _iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    above = _shorts(blocks[:, 34:50])
    scales = _half(blocks[:, :2]) * (2 * ((above >> 12) & 7) + 1).float()
    shifts = torch.where(above >> 15 == 0, _SHIFT, -_SHIFT)
    places = blocks[:, 2:34].long() | (
        (_shifted(above, (0, 3, 6, 9)) & 7).transpose(1, 2).flatten(1) << 8
    )
    vectors = grid_of(IntegerFormat.IQ1_S)[places].view(-1, 8, 32)
    return _grouped(scales, vectors + shifts.unsqueeze(-1))


def _iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    shorts = _shorts(blocks[:, 48:])
    nibbles = shorts >> 12
    factor = nibbles[:, :1] | nibbles[:, 1:2] << 4 | nibbles[:, 2:3] << 8 | nibbles[:, 3:] << 12
    by_group = (_shifted(shorts, (0, 3, 6, 9)) & 7).transpose(1, 2).flatten(1)
    factors = (factor & 0xFFFF).to(torch.int32).contiguous().view(torch.uint8)[:, :2]
    scales = _half(factors) * (2 * by_group + 1).float()
    above = _nibbles_in_order(blocks[:, 32:48]).long()
    places = blocks[:, :32].long() | ((above & 7) << 8)
    shifts = torch.where(above & 8 == 0, _SHIFT, -_SHIFT)
    vectors = grid_of(IntegerFormat.IQ1_M)[places] + shifts.unsqueeze(-1)
    return _grouped(scales, vectors)


DECODERS: Mapping[IntegerFormat, Callable[[torch.Tensor], torch.Tensor]] = {
    IntegerFormat.Q4_K: _q4_k,
    IntegerFormat.Q5_K: _q5_k,
    IntegerFormat.Q6_K: _q6_k,
    IntegerFormat.IQ4_XS: _iq4_xs,
    IntegerFormat.Q2_K: _q2_k,
    IntegerFormat.Q3_K: _q3_k,
    IntegerFormat.Q4_1: _q4_1,
    IntegerFormat.Q5_0: _q5_0,
    IntegerFormat.Q5_1: _q5_1,
    IntegerFormat.IQ4_NL: _iq4_nl,
    IntegerFormat.IQ3_S: _iq3_s,
    IntegerFormat.IQ3_XXS: _iq3_xxs,
    IntegerFormat.IQ2_S: _iq2_s,
    IntegerFormat.IQ2_XS: _iq2_xs,
    IntegerFormat.IQ2_XXS: _iq2_xxs,
    IntegerFormat.IQ1_S: _iq1_s,
    IntegerFormat.IQ1_M: _iq1_m,
    IntegerFormat.TQ1_0: _tq1_0,
    IntegerFormat.TQ2_0: _tq2_0,
    IntegerFormat.MXFP4: _mxfp4,
    IntegerFormat.NVFP4: _nvfp4,
    IntegerFormat.Q1_0: _q1_0,
    IntegerFormat.Q2_0: _q2_0,
    IntegerFormat.INT4_ZEROS: _int4_zeros,
}
"""[n, inputs] float32 from blocks [n, bytes] uint8."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """The values that digits stand for, digits of a vector, and the differences."""

    values: tuple[int, ...]
    width: int
    text: str


@cache
def grid_of(kind: IntegerFormat) -> torch.Tensor:
    """The vectors of a grid format [entries, 4 or 8], float32."""
    grid = _GRIDS[IntegerFormat.IQ1_S if kind is IntegerFormat.IQ1_M else kind]
    differences = bytearray(zlib.decompress(base64.b85decode(grid.text)))
    numbers = torch.frombuffer(differences, dtype=torch.int16).long().cumsum(0)
    powers = torch.tensor([len(grid.values) ** digit for digit in range(grid.width)])
    digits = numbers.unsqueeze(-1) // powers % len(grid.values)
    return torch.tensor(grid.values, dtype=torch.float32)[digits]


_GRIDS = {
    IntegerFormat.IQ3_S: _Grid(
        (1, 3, 5, 7, 9, 11, 13, 15),
        4,
        "c-mD{Yfr;440PH&+9q9Bw!y|g0u5<`?-T$3pK-o8(@>SfcKkSBToH$_myV~y*-`cqB|z%UqH==P-"
        "~Bwj)Z(cnnXw1NIa(a=dirR#mT87GK=-sH)`*OlnWvXbO|6mpA`|q&+hD#6q|6K(S)nE7Za#`+|A4b~ReR7F%|8-"
        "r?NOr=t0mq??33~04avmSSg80MBUeb-"
        "SejX-a&macxyY5>>HYc6Xn{?mhkq!$J1S=!ReiR%(iM%{x@(OiwTZbC@q1#fY<l$Dsz!8}v5&AP-"
        "km4~ShPmQKG1uTH*)ETJHzs7csfS3+2~m>GOA-HMY|=2dQ;!<L~erhHu6+71LsYrXypsf%$<o~g0{o=VeDqP*qhY;6F#jJtajv-MB-L-"
        "fjk7ffbvx67wnZTIG>Qw0a+o^Pe>~wkDM@N>BL-$veqm1Z&aQ~;8G?hR-NSqr$en7XR*mCxGnO9wL{b|JK5lDGkXC3EpolfGtfl#ty~t"
        "OzQK3F>Vaer-?Mxp=0-H5Wzb5RA;Yu7o3(#V`8;tlHppH7>ZAO?_X9|;@&~>@55W",
    ),
    IntegerFormat.IQ3_XXS: _Grid(
        (4, 12, 20, 28, 36, 44, 52, 62),
        4,
        "c-l>nT~C8R5JfK_-_RlyslnFP+N2s2qdxnlzBT^;f8&`cA%^TOJ9FmFos~kqn02LqJyot-"
        "zg?m!f03W1DrFO$dc>$gi58rRSC=}d(+a}q(BqvNeP|$Rnmu$gYhO;Q3$*r##a`!pss|K8YI4=om1rDvVsFu{bSAU=r(|Ap-MeNqDU3c"
        "@=C_N>n!U!4&Gy3Dqq62+z<#@%L3i_vJ#0L?C^<*(R+DM8#K|Xn2a(`tq<c%|#9BcwU@Ll@xh?72KwWDKbtG$@dvcMhzteZXX#zDs*ld"
        "}ew3+74i2mZ($i^!+5L=WUsrf<es5d%W-d-TUNdsT#8DFt(@NE6|MD2}Qed!PKX%Cq",
    ),
    IntegerFormat.IQ2_S: _Grid(
        (8, 25, 43),
        8,
        "c-"
        "oy+OKQVF3>9GzLojAAC757JFvWyWvM3>oE_;Tap^M!A0F^XjXZ~@5u|1ZhXX!m@46rF2YQ;0sRb?YFiBiEEjC>GufY1uEBCCFoM|@!6i"
        "z$kFkT=3M%E-"
        "4PbeS4UY;YxQkRMxoL``^%Ypq)tp~+URs`{vE)iovWYqRi!E_Za+e9g}>S@U50l;wS*n@%G843>c%tr($&V^J%cg_aIffktyrVvvm{U1"
        "oNA;YAfYu3i~;)ZpG3m;#>nj%kE%s-"
        "hu3?uNIOiu$vF*{pK&Qdeg7#;A_|<vv@}6|(|emeHMft4e%RjBQ10UR|Hs@xnQIt*1G1SRI|S4NC`IGw(Ishow3LC+eJZ_wbc0^JM5Nm"
        "ajv!WBHlzT(GBsAJ@T0`es9Y{0pDKy!tzfzZ0Uj^OX5U=VQIB<(x37SM#W4rY!0;n7~O;dg`$Yog1p96N~aDr=<2BMH7y-"
        "ens4;eRz`04-`2r>RxCy()}j5_K!I4P7|F2<u;0bjQZ|)QVwwx?F{@8j-d?BRP7*t7tZ2?p8f%+y&0h",
    ),
    IntegerFormat.IQ2_XS: _Grid(
        (8, 25, 43),
        8,
        "c-n=ML2JV>426XW#+VR72%(HnN*JMx5=t38j2(LDX^fr6PCM<m-?E>)&$1WVrs*(oB~^M)dX|WpIoTE8p4j2@S1avVg-yTJS=8&DNg+<"
        "^f0)AUXE8hoty+b~TUlImlPOy0BnQEzXho)lyW-"
        "v?hFe|Olgeoq71)LjV!YzqPqKoQW4EbdkJrdH@sxNqekOw)<zb@fA5S$}mYNkc9TP{El6w!nC!XUyr`bKYHQhZCUGVjqe@pjE?XJ(9!Q"
        "oO>q1@B`h}x8D<*Idfu?A}xQ5>fuUZ<JfW;UoDx5mh$EM+%p<5ZXMx)w#PtU+n;a_z8FO^kf&Zp4n9>TTo;v?W=EylO8Sc?WwZ2dYBl+"
        "y*o!x&>~Fs`1s!v16mUR77ex2JT+BuB6&4hLcY?0<s^cEckyxZYwX`HSs%D;Xt*azYnJCdE1q;MV%e!136vNK2(Qp*7BnmasRf86J9B3"
        "-^23@mMj^e",
    ),
    IntegerFormat.IQ2_XXS: _Grid(
        (8, 25, 43),
        8,
        "c-mEw!AiqG6h*Hxgb;=xA%sE7P$Wnw5<+oNqze}!(nXOjq|1JZOFzJG@mu^J&%BO72{W1Z=HC16dm~-"
        "``3jbs&xM@}TVAF8ooYoQPt>T_wPmZB>+{*qajlk9rC^N6`qlNbe#dRl2Gn!bE5Z3(FCiN;l_u6YGd;R1Ep-"
        "Fp$ykjR_;Ey|?kv;k%6zZcC;qP)S8D*<>O@t~&AaaZbzFdVxs%3pQykcX`H1GBN4+E3>X4C+N-JY-aCYuA_1Cipyp8miJOu4@3$h}=gu"
        "m6^_yOesZiM0V26EJgzD>Qw#lj~4sF(RI(i@~1blf*+9&|+eJpYmGpa(p)R66R5seBqXf;p+YnDhhew-^K",
    ),
    IntegerFormat.IQ1_S: _Grid(
        (-1, 0, 1),
        8,
        "c-oCuYnS672(5x7leROn-}nFj&NaLQO=k9Zni?M{aJi7jqk4l!>rd>z_8=bF!-)0pQFONU-nkNe#zwav_MbbbKV>!Q$>48K-AUY#&-"
        ">E1Q+DZdvZCs2(eawvhsvxz``K5&`aik8g-"
        ";a8$S1FN#ak`TUSn(Q{RukqQt5Q7JE*0ljoE{5X)<fD>?!@FtHJMYO;(ZG!kWzNY^QU_w|k@oU!mICY%aGfdM5ID!?s0lSp9a8tS@_P#"
        "p)9oYvGP%T3OOa_U-Wh&=1pYP`RLz3tLjqwX<)~wXGNT6eJuSDK-lo%R}pNA7n|8?(xyrZvB6oyki){zWzv<Fa$(YT+NDqH$In=EzO^#"
        "c$=dbZ|8Q^cu!uH5jhbUb>#6euqbN}_y1^eQqx_eSZ<2N<0g)d5CeuuP_1o*!U;`LI`0}9x7%2Lxu(*-"
        "SyN$>fr^2!I$6Bxxfw%(>1T+fLw%1O7p=chKN)(TmRQJ=Od6?eGe&WGH#`p17v<;~v&~}!Zcc>|lg7?wnW2}k!WQyDj2-I%-"
        "=`!UFvM%*hQXZ{TjrT>k9*nu$##r9gn<F0zN8s~63=IT$+oH&v+<_mOj`Vbet*kLdB=yxUtv5Hmmz+G1z{z5woF!|v|9W=TejS??5tb4"
        "Xm!yZmKj)N)`@**+2B&H&m8PB#(+_1BP~THDh})9Q|ZS!yo@Kh#Kh`#&^Fc(Gt|cDK}THFaKzP?EcFV^O9_2~kax&Xf;O=z=^cuXNp`k"
        "O{L<>FFw2Rx-^zJkp3&>Xes#&RyRMt#6jR-FR#P(v)u895;}A|3|21XsoOL3CP$lL34*dI4uZ^rAS!UNPnDZmJCt|#U-"
        "@_`a(+ls3Q40Ha3l`3qriH5Eu0E`xx{O*jodNHy5}s=Fb>^*A=H{6gwYH_eM$z9R2VB);r_VoAB`j96cmdXC3oI9FNbve()bP;`rtLn}"
        "tyV)EzgX~nlgT9tDP-tfzenbLv|=8;#w}iNj69S5MjEffR#nHI38gznT8<le?i#UW$`mC<4tOo~e|%I!y}#Dlq^#KjGZ`n7`UO2gjFAq"
        "nR57q|;i?5)@0B}d3&-jMQVy3o@T0dqeZ9P#iQhlO($yE*$exASA!bvlD?wvMzD)7gO7V~So<emC&ij8SEaZxSmfU~VG3E{69V3%~@-"
        "{ld)rD!EKj^+|l}_A4-_hKPS;}hLf0HK}p#",
    ),
}
