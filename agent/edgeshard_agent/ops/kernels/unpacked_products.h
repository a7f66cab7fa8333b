// Products of rows of int8 with weights in llama.cpp's other block formats. block_products.h multiplies what it reads. This
// header unpacks 256 inputs of 32 outputs at a time into bytes, for all rows of a call, and multiplies those. Groups are
// added in order by the same operations, so that bits do not depend on the rows.
#pragma once

#include "block_products.h"
#include "outputs.h"

namespace {

// 32 inputs of 32 outputs: bytes of four inputs side by side, and of each group of 32 or 16 inputs what multiplies the
// products and the sum of the inputs.
struct UnpackedRun {
    alignas(64) char weights[8][4 * PANEL];
    alignas(64) float scales[2][PANEL];
    alignas(64) float minima[2][PANEL];
};

constexpr int UNPACKED_RUNS = BLOCK_INPUTS / GROUP_STEP;
// Rows whose sums are kept while a panel passes, and rows of a tile.
constexpr int UNPACKED_ROWS = 96;
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int UNPACKED_TILE = 4;
#else
constexpr int UNPACKED_TILE = 2;
#endif

// 16 lanes of float16 bits as numbers.
ES_INLINE Float16 halves_as_float(Word16 bits) {
    const Float16 magnitude = (Float16)((bits & 0x7fffu) << 13) * 0x1p112f;
    return (Float16)((Word16)magnitude | (bits & 0x8000u) << 16);
}

// The 32-bit entries of a table at 16 places.
ES_INLINE Word16 entries(const void* table, Word16 places) {
#if defined(__AVX512F__)
    return (Word16)_mm512_i32gather_epi32((__m512i)places, table, 4);
#elif defined(__AVX2__)
    // Single loads: an AVX2 processor gathers more slowly.
    const int32_t* values = static_cast<const int32_t*>(table);
    auto four = [&](__m128i at) {
        const auto low = static_cast<uint64_t>(_mm_cvtsi128_si64(at));
        const auto high = static_cast<uint64_t>(_mm_extract_epi64(at, 1));
        const __m128i first = _mm_insert_epi32(_mm_cvtsi32_si128(values[low & 0xffffffffu]), values[low >> 32], 1);
        const __m128i second = _mm_insert_epi32(_mm_cvtsi32_si128(values[high & 0xffffffffu]), values[high >> 32], 1);
        return _mm_unpacklo_epi64(first, second);
    };
    return Word16::of([&](int i) {
        const __m256i at = (__m256i)places.parts[i];
        return (WordPart)_mm256_set_m128i(four(_mm256_extracti128_si256(at, 1)), four(_mm256_castsi256_si128(at)));
    });
#else
    uint32_t found[LANES];
    for (int i = 0; i < LANES; i++) found[i] = load<uint32_t>(static_cast<const char*>(table) + 4 * places[i]);
    return load<Word16>(found);
#endif
}

// The bytes of a table of 16 at places below 16.
ES_INLINE Word16 bytes_at(const int8_t (&table)[16], Word16 places) {
#if defined(__AVX512F__)
    const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return (Word16)_mm512_shuffle_epi8(values, (__m512i)places);
#elif defined(__AVX2__)
    const __m256i values = _mm256_broadcastsi128_si256(load<__m128i>(table));
    return Word16::of([&](int i) { return (WordPart)_mm256_shuffle_epi8(values, (__m256i)places.parts[i]); });
#elif defined(__aarch64__)
    const uint8x16_t values = load<uint8x16_t>(table);
    return Word16::of([&](int i) { return (WordPart)vqtbl1q_u8(values, (uint8x16_t)places.parts[i]); });
#else
    uint8_t bytes[4 * LANES];
    std::memcpy(bytes, &places, sizeof(bytes));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(table[byte]);
    return load<Word16>(bytes);
#endif
}

// The first and the second halves of the 64-bit entries of a table at 16 places.
struct WordPair {
    Word16 first, second;
};
ES_INLINE WordPair entry_pairs(const void* table, Word16 places) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // One load for both halves.
    const long long* values = static_cast<const long long*>(table);
    __m256 low[PARTS], high[PARTS];
    auto two = [&](uint64_t at) {
        return _mm_insert_epi64(_mm_cvtsi64_si128(values[at & 0xffffffffu]), values[at >> 32], 1);
    };
    auto four = [&](__m128i at) {
        const __m128i first = two(static_cast<uint64_t>(_mm_cvtsi128_si64(at)));
        return (__m256)_mm256_set_m128i(two(static_cast<uint64_t>(_mm_extract_epi64(at, 1))), first);
    };
#pragma GCC unroll 2
    for (int i = 0; i < PARTS; i++) {
        const __m256i at = (__m256i)places.parts[i];
        low[i] = four(_mm256_castsi256_si128(at));
        high[i] = four(_mm256_extracti128_si256(at, 1));
    }
    auto in_order = [](__m256 mixed) { return (WordPart)_mm256_permute4x64_epi64((__m256i)mixed, 0xd8); };
    return {Word16::of([&](int i) { return in_order(_mm256_shuffle_ps(low[i], high[i], 0x88)); }),
            Word16::of([&](int i) { return in_order(_mm256_shuffle_ps(low[i], high[i], 0xdd)); })};
#else
    return {entries(table, places * 2u), entries(table, places * 2u + 1u)};
#endif
}

// For each of the four bits from 4 * quarter on a byte of ones if it is set.
ES_INLINE Word16 masks(Word16 bits, int quarter) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const int byte = quarter / 2;
    const __m256i copied = _mm256_add_epi8(_mm256_set1_epi32(byte * 0x01010101),
                                           _mm256_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c,
                                                            0x08080808, 0x04040404, 0));
    const __m256i single = _mm256_set1_epi32(quarter % 2 ? static_cast<int>(0x80402010u) : 0x08040201);
    return Word16::of([&](int i) {
        const __m256i four = _mm256_and_si256(_mm256_shuffle_epi8((__m256i)bits.parts[i], copied), single);
        return (WordPart)_mm256_cmpeq_epi8(four, single);
    });
#else
    const Word16 spread = ((bits >> (4 * quarter)) & 15u) * 0x00204081u & 0x01010101u;
    return (spread << 8) - spread;
#endif
}

// Bytes above 0, negated if the mask is set.
ES_INLINE Word16 with_signs(Word16 sizes, Word16 mask) {
    return (sizes ^ mask) + (mask & 0x01010101u);
}

// Four fields of 7 bits of signs as bytes: the eighth bit makes the number of ones even.
ES_INLINE Word16 with_parity(Word16 fields) {
    Word16 ones = fields ^ ((fields >> 4) & 0x07070707u);
    ones ^= (ones >> 2) & 0x03030303u;
    ones ^= (ones >> 1) & 0x01010101u;
    return fields | (ones & 0x01010101u) << 7;
}
ES_INLINE Word16 seven_bit_fields(Word16 word) {
    return with_parity((word & 0x7fu) | (word << 1 & 0x7f00u) | (word << 2 & 0x7f0000u) | (word << 3 & 0x7f000000u));
}

// A packed block of 32 outputs, of which 16 are read: the stored bytes of a block, in units of 1, 2 or 4 bytes, the same
// unit of all outputs side by side. Offsets are those in a stored block.
struct PackedBlock {
    const char* bytes;
    int vector;
    const void* table;
    // Each store of weights fetches from `ahead`, and moves it on by `step` bytes. 0: the processor foresees all.
    const char* ahead;
    int step;

    ES_INLINE Word16 word(int offset, int index = 0) const {
        return load<Word16>(bytes + PANEL * (offset + 4 * index) + 64 * vector);
    }
    ES_INLINE Float16 half(int offset) const {
        return load_half(reinterpret_cast<const uint16_t*>(bytes + PANEL * offset) + LANES * vector);
    }
    ES_INLINE Word16 byte(int offset) const {
        return (Word16)load_bytes<false>(bytes + PANEL * offset + LANES * vector);
    }
    ES_INLINE void put(UnpackedRun& run, int quarter, Word16 weights) {
        if (step) __builtin_prefetch(ahead);
        ahead += step;
        store(run.weights[quarter] + 64 * vector, weights);
    }
    ES_INLINE void put_scale(UnpackedRun& run, int group, Float16 scale) const {
        store(run.scales[group] + LANES * vector, scale);
    }
    ES_INLINE void put_minimum(UnpackedRun& run, int group, Float16 minimum) const {
        store(run.minima[group] + LANES * vector, minimum);
    }
};

ES_INLINE Float16 as_number(Word16 value) { return to_float((Int16)value); }

// How a format is unpacked: inputs and bytes of a block, inputs that share a scale, the largest byte (without its sign),
// what it has been raised by, and `unpack`, which writes 16 outputs of the runs of a block.
template <int INPUTS_, int BYTES_, int GROUP_, int LARGEST_, int ZERO_, bool IS_SIGNED_ = false,
          bool HAS_MINIMA_ = false>
struct UnpackingOf {
    static constexpr int INPUTS = INPUTS_, BYTES = BYTES_, GROUP = GROUP_, LARGEST = LARGEST_, ZERO = ZERO_;
    static constexpr bool IS_SIGNED = IS_SIGNED_, HAS_MINIMA = HAS_MINIMA_;
};
template <int32_t SCHEME>
struct Unpacking;

// 32 weights in 16 bytes, the first half in the low nibbles. `weights` makes bytes of nibbles of a quarter.
template <class Made>
ES_INLINE void put_nibbles(PackedBlock& block, int offset, UnpackedRun& run, const Made& weights) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        const Word16 pairs = block.word(offset, q);
        block.put(run, q, weights(pairs & 0x0f0f0f0fu, q));
        block.put(run, q + 4, weights((pairs >> 4) & 0x0f0f0f0fu, q + 4));
    }
}

template <>
struct Unpacking<Q4_1> : UnpackingOf<32, 20, 32, 15, 0, false, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* run) {
        block.put_scale(*run, 0, block.half(0));
        block.put_minimum(*run, 0, block.half(2));
        put_nibbles(block, 4, *run, [](Word16 nibbles, int) { return nibbles; });
    }
};
template <>
struct Unpacking<INT4_ZEROS> : UnpackingOf<32, 19, 32, 15, 0, false, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* run) {
        const Float16 scale = block.half(0);
        block.put_scale(*run, 0, scale);
        block.put_minimum(*run, 0, -(scale * as_number(block.byte(2))));
        put_nibbles(block, 3, *run, [](Word16 nibbles, int) { return nibbles; });
    }
};
template <>
struct Unpacking<Q5_0> : UnpackingOf<32, 22, 32, 31, 16> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* run) {
        block.put_scale(*run, 0, block.half(0));
        const Word16 high = block.word(2);
        put_nibbles(block, 6, *run, [&](Word16 nibbles, int q) { return nibbles | (masks(high, q) & 0x10101010u); });
    }
};
template <>
struct Unpacking<Q5_1> : UnpackingOf<32, 24, 32, 31, 0, false, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* run) {
        block.put_scale(*run, 0, block.half(0));
        block.put_minimum(*run, 0, block.half(2));
        const Word16 high = block.word(4);
        put_nibbles(block, 8, *run, [&](Word16 nibbles, int q) { return nibbles | (masks(high, q) & 0x10101010u); });
    }
};
template <>
struct Unpacking<IQ4_NL> : UnpackingOf<32, 18, 32, 127, 0, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* run) {
        block.put_scale(*run, 0, block.half(0));
        put_nibbles(block, 2, *run, [](Word16 nibbles, int) { return bytes_at(LEVELS, nibbles); });
    }
};

// Twice the numbers of E2M1.
constexpr int8_t TWICE_FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

template <>
struct Unpacking<MXFP4> : UnpackingOf<32, 17, 32, 12, 0, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* run) {
        block.put_scale(*run, 0, (Float16)entries(block.table, block.byte(0)));
        put_nibbles(block, 1, *run, [](Word16 nibbles, int) { return bytes_at(TWICE_FP4, nibbles); });
    }
};
template <>
struct Unpacking<NVFP4> : UnpackingOf<64, 36, 16, 12, 0, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Word16 scales = block.word(0);
        for (int group = 0; group < 4; group++) {
            UnpackedRun& run = runs[group / 2];
            block.put_scale(run, group % 2, (Float16)entries(block.table, (scales >> (8 * group)) & 0xffu));
            for (int half = 0; half < 2; half++) {
                const Word16 pairs = block.word(4, 2 * group + half);
                const int quarter = group % 2 * 4 + half;
                block.put(run, quarter, bytes_at(TWICE_FP4, pairs & 0x0f0f0f0fu));
                block.put(run, quarter + 2, bytes_at(TWICE_FP4, (pairs >> 4) & 0x0f0f0f0fu));
            }
        }
    }
};
template <>
struct Unpacking<Q1_0> : UnpackingOf<128, 18, 32, 2, 1> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Float16 scale = block.half(0);
        for (int r = 0; r < 4; r++) {
            const Word16 bits = block.word(2, r);
            block.put_scale(runs[r], 0, scale);
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++) block.put(runs[r], q, masks(bits, q) & 0x02020202u);
        }
    }
};
template <>
struct Unpacking<Q2_0> : UnpackingOf<64, 18, 32, 3, 1> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Float16 scale = block.half(0);
        for (int half = 0; half < 4; half++) {
            const Word16 bits = block.word(2, half);
            block.put_scale(runs[half / 2], 0, scale);
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                const Word16 byte = (bits >> (8 * q)) & 0xffu;
                const Word16 pairs = (byte | byte << 12) & 0x000f000fu;
                block.put(runs[half / 2], half % 2 * 4 + q, (pairs | pairs << 6) & 0x03030303u);
            }
        }
    }
};

// 256 weights of two bits in 64 bytes: halves of 128, in each four quarters of 32. `weights` makes bytes of them.
template <class Made>
ES_INLINE void put_two_bits(PackedBlock& block, int offset, UnpackedRun* runs, const Made& weights) {
    for (int half = 0; half < 2; half++)
        for (int q = 0; q < 8; q++) {
            const Word16 four = block.word(offset, 8 * half + q);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++)
                block.put(runs[4 * half + r], q, weights((four >> (2 * r)) & 0x03030303u, 4 * half + r, q));
        }
}

template <>
struct Unpacking<Q2_K> : UnpackingOf<256, 84, 16, 3, 0, false, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Float16 scale = block.half(80), minimum = -block.half(82);
        for (int group = 0; group < 16; group++) {
            const Word16 byte = block.word(0, group / 4) >> (8 * (group % 4));
            block.put_scale(runs[group / 2], group % 2, as_number(byte & 15u) * scale);
            block.put_minimum(runs[group / 2], group % 2, as_number((byte >> 4) & 15u) * minimum);
        }
        put_two_bits(block, 16, runs, [](Word16 weights, int, int) { return weights; });
    }
};
template <>
struct Unpacking<Q3_K> : UnpackingOf<256, 110, 16, 7, 4> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Float16 factor = block.half(108);
        for (int four = 0; four < 4; four++) {
            const Word16 low = block.word(96, four % 2) >> (4 * (four / 2)), high = block.word(104) >> (2 * four);
            const Word16 scales = (low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4;
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const Int16 scale = (Int16)((scales >> (8 * i)) & 0xffu) - 32;
                block.put_scale(runs[2 * four + i / 2], i % 2, to_float(scale) * factor);
            }
        }
        put_two_bits(block, 32, runs, [&](Word16 low, int r, int q) {
            return low | ((block.word(0, q) >> r) & 0x01010101u) << 2;
        });
    }
};
template <>
struct Unpacking<TQ2_0> : UnpackingOf<256, 66, 32, 3, 1> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Float16 scale = block.half(64);
        for (int r = 0; r < 8; r++) block.put_scale(runs[r], 0, scale);
        put_two_bits(block, 0, runs, [](Word16 weights, int, int) { return weights; });
    }
};
template <>
struct Unpacking<TQ1_0> : UnpackingOf<256, 54, 32, 2, 1> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        constexpr uint32_t POWERS[5] = {1, 3, 9, 27, 81};
        const Float16 scale = block.half(52);
        for (int r = 0; r < 8; r++) block.put_scale(runs[r], 0, scale);
        for (int power = 0; power < 5; power++) {
            for (int q = 0; q < 8; q++) block.put(runs[power], q, digits(block.word(0, q), POWERS[power]));
            for (int q = 0; q < 4; q++)
                block.put(runs[5 + power / 2], power % 2 * 4 + q, digits(block.word(32, q), POWERS[power]));
        }
        for (int power = 0; power < 4; power++) block.put(runs[7], 4 + power, digits(block.word(48), POWERS[power]));
    }

   private:
    // The leading digit to the base of three of the fraction byte * power / 256.
    static ES_INLINE Word16 digits(Word16 bytes, uint32_t power) {
        const Word16 even = ((bytes & 0x00ff00ffu) * power & 0x00ff00ffu) * 3u >> 8;
        const Word16 odd = (((bytes >> 8) & 0x00ff00ffu) * power & 0x00ff00ffu) * 3u >> 8;
        return (even & 0x00ff00ffu) | (odd & 0x00ff00ffu) << 8;
    }
};

// Formats whose weights are places in a table of vectors: of four bytes each (IQ3), or of eight.
template <>
struct Unpacking<IQ3_S> : UnpackingOf<256, 110, 32, 15, 0, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Float16 factor = block.half(0);
        const Word16 scales = block.word(106);
        for (int r = 0; r < 8; r++) {
            block.put_scale(runs[r], 0, factor * as_number(((scales >> (4 * r)) & 15u) * 2u + 1u));
            const Word16 signs = block.word(74, r), high = block.word(66, r / 4) >> (8 * (r % 4));
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const Word16 low = block.word(2, 2 * r + half);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const int q = 4 * half + i;
                    const Word16 place = ((low >> (8 * i)) & 0xffu) | ((high >> q) & 1u) << 8;
                    block.put(runs[r], q, with_signs(entries(block.table, place), masks(signs, q)));
                }
            }
        }
    }
};
template <>
struct Unpacking<IQ3_XXS> : UnpackingOf<256, 98, 32, 62, 0, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Float16 factor = block.half(0);
        for (int r = 0; r < 8; r++) {
            const Word16 word = block.word(66, r), signs = seven_bit_fields(word);
            block.put_scale(runs[r], 0, factor * (as_number(word >> 28) + splat(0.5f)) * splat(0.5f));
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const Word16 places = block.word(2, 2 * r + half);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const Word16 sizes = entries(block.table, (places >> (8 * i)) & 0xffu);
                    block.put(runs[r], 4 * half + i, with_signs(sizes, masks(signs, 4 * half + i)));
                }
            }
        }
    }
};

// Eight inputs from the place of a vector of eight bytes, with their signs.
ES_INLINE void put_octet(PackedBlock& block, UnpackedRun& run, int octet, Word16 place, Word16 signs) {
    const WordPair sizes = entry_pairs(block.table, place);
    block.put(run, 2 * octet, with_signs(sizes.first, masks(signs, 2 * octet)));
    block.put(run, 2 * octet + 1, with_signs(sizes.second, masks(signs, 2 * octet + 1)));
}
ES_INLINE Float16 quarter_scale(Float16 factor, Word16 nibble) {
    return factor * (as_number(nibble) + splat(0.5f)) * splat(0.25f);
}

template <>
struct Unpacking<IQ2_XXS> : UnpackingOf<256, 66, 32, 43, 0, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Float16 factor = block.half(0);
        for (int r = 0; r < 8; r++) {
            const Word16 places = block.word(2, 2 * r), word = block.word(2, 2 * r + 1);
            const Word16 signs = seven_bit_fields(word);
            block.put_scale(runs[r], 0, quarter_scale(factor, word >> 28));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) put_octet(block, runs[r], i, (places >> (8 * i)) & 0xffu, signs);
        }
    }
};
template <>
struct Unpacking<IQ2_XS> : UnpackingOf<256, 74, 16, 43, 0, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Float16 factor = block.half(0);
        for (int r = 0; r < 8; r++) {
            const Word16 first = block.word(2, 2 * r), second = block.word(2, 2 * r + 1);
            const Word16 fields = ((first >> 9) & 0x7fu) | (first >> 17 & 0x7f00u) | (second << 7 & 0x7f0000u) |
                                  (second >> 1 & 0x7f000000u);
            const Word16 signs = with_parity(fields), scales = block.word(66, r / 4) >> (8 * (r % 4));
            block.put_scale(runs[r], 0, quarter_scale(factor, scales & 15u));
            block.put_scale(runs[r], 1, quarter_scale(factor, (scales >> 4) & 15u));
            put_octet(block, runs[r], 0, first & 511u, signs);
            put_octet(block, runs[r], 1, (first >> 16) & 511u, signs);
            put_octet(block, runs[r], 2, second & 511u, signs);
            put_octet(block, runs[r], 3, (second >> 16) & 511u, signs);
        }
    }
};
template <>
struct Unpacking<IQ2_S> : UnpackingOf<256, 82, 16, 43, 0, true> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Float16 factor = block.half(0);
        for (int r = 0; r < 8; r++) {
            const Word16 low = block.word(2, r), signs = block.word(34, r);
            const Word16 high = block.word(66, r / 4) >> (8 * (r % 4));
            const Word16 scales = block.word(74, r / 4) >> (8 * (r % 4));
            block.put_scale(runs[r], 0, quarter_scale(factor, scales & 15u));
            block.put_scale(runs[r], 1, quarter_scale(factor, (scales >> 4) & 15u));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                put_octet(block, runs[r], i, ((low >> (8 * i)) & 0xffu) | ((high >> (2 * i)) & 3u) << 8, signs);
        }
    }
};

// Values of IQ1 are a grid of -1, 0 and 1 and a distance of 1/8 from it, up or down. Bytes are eight times that, and 9
// more: the table has 8 * (value + 1).
ES_INLINE void put_shifted(PackedBlock& block, UnpackedRun& run, int octet, Word16 place, Word16 is_down) {
    const Word16 shift = (is_down - 1u) & 0x02020202u;
    const WordPair raised = entry_pairs(block.table, place);
    block.put(run, 2 * octet, raised.first | shift);
    block.put(run, 2 * octet + 1, raised.second | shift);
}

template <>
struct Unpacking<IQ1_S> : UnpackingOf<256, 50, 32, 18, 9> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Float16 factor = block.half(0);
        for (int r = 0; r < 8; r++) {
            const Word16 low = block.word(2, r), high = block.word(34, r / 2) >> (16 * (r % 2));
            block.put_scale(runs[r], 0, factor * as_number((high >> 12 & 7u) * 2u + 1u) * splat(0.125f));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const Word16 place = ((low >> (8 * i)) & 0xffu) | ((high >> (3 * i)) & 7u) << 8;
                put_shifted(block, runs[r], i, place, (high >> 15) & 1u);
            }
        }
    }
};
template <>
struct Unpacking<IQ1_M> : UnpackingOf<256, 56, 16, 18, 9> {
    static ES_INLINE void unpack(PackedBlock& block, UnpackedRun* runs) {
        const Word16 first = block.word(48), second = block.word(52);
        const Word16 bits = (first >> 12 & 0xfu) | (first >> 24 & 0xf0u) | (second >> 4 & 0xf00u) |
                            (second >> 16 & 0xf000u);
        const Float16 factor = halves_as_float(bits);
        for (int r = 0; r < 8; r++) {
            const Word16 scales = (r < 4 ? first : second) >> (16 * (r / 2 % 2) + 6 * (r % 2));
            block.put_scale(runs[r], 0, factor * as_number((scales & 7u) * 2u + 1u) * splat(0.125f));
            block.put_scale(runs[r], 1, factor * as_number((scales >> 3 & 7u) * 2u + 1u) * splat(0.125f));
            const Word16 low = block.word(0, r), high = block.word(32, r / 2) >> (16 * (r % 2));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const Word16 nibble = high >> (4 * i);
                const Word16 place = ((low >> (8 * i)) & 0xffu) | (nibble & 7u) << 8;
                put_shifted(block, runs[r], i, place, (nibble >> 3) & 1u);
            }
        }
    }
};

// The factors of unpacked runs: rows of int8 from some input on, and for each row the scales and sums of groups.
struct UnpackedInputs {
    const char* rows;
    int64_t row_bytes;
    const float* scales;
    const int32_t* totals;
    int64_t stride;  // from a group's scales and sums to the next one's
};

// Quarters whose products a lane of 16 bits holds.
constexpr int quarters_at_once([[maybe_unused]] int largest, [[maybe_unused]] int group) {
    int count = 1;
#if defined(ES_PAIRS_OF_BYTES)
    while (2 * count <= group / 4 && 2 * count * 2 * largest * 127 <= 32767) count *= 2;
#endif
    return count;
}

template <int GROUP, int AT_ONCE, bool IS_SIGNED, bool HAS_MINIMA, int ROWS>
struct UnpackedTile {
    static constexpr int VECTORS = integer_vectors(ROWS) == 2 ? 2 : 1;
    static constexpr int QUARTERS = GROUP / 4;

    // Adds the products of `count` runs to the sums of ROWS rows, [ROWS][PANEL].
    static __attribute__((noinline)) void add(const UnpackedRun* runs, int count, int zero, UnpackedInputs x,
                                              float* sums) {
        if constexpr (IN_REGISTERS) {
            Float16 kept[ROWS][VECTORS];
            for_each([&](int r, int v) { kept[r][v] = load<Float16>(sums + r * PANEL + v * LANES); });
#pragma GCC unroll 1
            for (int run = 0; run < count; run++, x.rows += GROUP_STEP, x.scales += x.stride)
#pragma GCC unroll 1
                for (int group = 0; group < GROUP_STEP / GROUP; group++, x.totals += x.stride)
                    add_group(runs[run], group, 0, zero, x, kept);
            for_each([&](int r, int v) { store(sums + r * PANEL + v * LANES, kept[r][v]); });
        } else {
            for (int run = 0; run < count; run++, x.rows += GROUP_STEP, x.scales += x.stride)
                for (int group = 0; group < GROUP_STEP / GROUP; group++, x.totals += x.stride)
                    for (int vector = 0; vector < 2; vector += VECTORS) {
                        Float16 kept[ROWS][VECTORS];
                        float* at = sums + vector * LANES;
                        for_each([&](int r, int v) { kept[r][v] = load<Float16>(at + r * PANEL + v * LANES); });
                        add_group(runs[run], group, vector, zero, x, kept);
                        for_each([&](int r, int v) { store(at + r * PANEL + v * LANES, kept[r][v]); });
                    }
        }
    }

   private:
    // Registers do not hold the sums of more rows besides products.
    static constexpr bool IN_REGISTERS = ROWS <= 2 && VECTORS == 2;

    template <class Task>
    static ES_INLINE void for_each(const Task& task) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) task(r, v);
    }

    static ES_INLINE void add_group(const UnpackedRun& run, int group, int vector, int zero, const UnpackedInputs& x,
                                    Float16 (&sums)[ROWS][VECTORS]) {
        Int16 dots[ROWS][VECTORS];
        for_each([&](int r, int v) { dots[r][v] = splat(-(zero + RAISED) * x.totals[r]); });
        const char* weights = run.weights[group * QUARTERS] + 64 * vector;
        const char* rows = x.rows + group * GROUP;
#if defined(ES_PAIRS_OF_BYTES)
#pragma GCC unroll 4
#else
#pragma GCC unroll 1  // portable code is long
#endif
        for (int q = 0; q < QUARTERS; q += AT_ONCE)
            add_quarters(dots, weights + q * CHUNK_BYTES, rows + 4 * q, x.row_bytes);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            const int column = (vector + v) * LANES;
            const Float16 scale = load<Float16>(run.scales[group] + column);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const float row_scale = x.scales[r];
                sums[r][v] = fma16(to_float(dots[r][v]), scale * splat(row_scale), sums[r][v]);
                if constexpr (HAS_MINIMA) {
                    const Float16 minimum = load<Float16>(run.minima[group] + column);
                    sums[r][v] = fma16(minimum, splat(static_cast<float>(x.totals[r]) * row_scale), sums[r][v]);
                }
            }
        }
    }

#if defined(ES_PAIRS_OF_BYTES)
    static constexpr int RAISED = 0;

    // A pair of products fits 16 bits if the weights are without their signs, which the inputs take.
    static ES_INLINE void add_quarters(Int16 (&dots)[ROWS][VECTORS], const char* weights, const char* rows,
                                       int64_t row_bytes) {
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            __m256i pairs[ROWS][PARTS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) pairs[r][0] = pairs[r][1] = _mm256_setzero_si256();
            const char* inputs_at = rows_for<ROWS>(v, rows);
#pragma GCC unroll 8
            for (int q = 0; q < AT_ONCE; q++) {
                __m256i signs[PARTS], sizes[PARTS];
#pragma GCC unroll 2
                for (int i = 0; i < PARTS; i++) {
                    signs[i] = load<__m256i>(weights + q * CHUNK_BYTES + 64 * v + 32 * i);
                    sizes[i] = IS_SIGNED ? _mm256_abs_epi8(signs[i]) : signs[i];
                }
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) {
                    const __m256i inputs = _mm256_set1_epi32(load<int32_t>(inputs_at + r * row_bytes + 4 * q));
#pragma GCC unroll 2
                    for (int i = 0; i < PARTS; i++) {
                        const __m256i signed_inputs = IS_SIGNED ? _mm256_sign_epi8(inputs, signs[i]) : inputs;
                        add_words(pairs[r][i], _mm256_maddubs_epi16(sizes[i], signed_inputs));
                    }
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                dots[r][v] += Int16::of([&](int i) { return (IntPart)_mm256_madd_epi16(pairs[r][i], ones); });
        }
    }
#else
#if defined(__ARM_FEATURE_DOTPROD)
    static constexpr int RAISED = 0;  // the instruction multiplies two signed bytes
#else
    static constexpr int RAISED = IS_SIGNED ? 128 : 0;
#endif

    static ES_INLINE void add_quarters(Int16 (&dots)[ROWS][VECTORS], const char* weights, const char* rows,
                                       int64_t row_bytes) {
        static_assert(AT_ONCE == 1);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            Word16 four = load<Word16>(weights + 64 * v);
            if constexpr (RAISED != 0) four = four ^ 0x80808080u;
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                dots[r][v] = dot_u8s8(dots[r][v], four, load<uint32_t>(rows + r * row_bytes));
        }
    }
#endif
};

template <class Form, int ROWS>
ES_INLINE void add_unpacked(int rows, const UnpackedRun* runs, int count, const UnpackedInputs& x, float* sums) {
    constexpr int AT_ONCE = quarters_at_once(Form::LARGEST, Form::GROUP);
    using Tile = UnpackedTile<Form::GROUP, AT_ONCE, Form::IS_SIGNED, Form::HAS_MINIMA, ROWS>;
    if (rows == ROWS) return Tile::add(runs, count, Form::ZERO, x, sums);
    if constexpr (ROWS > 1) add_unpacked<Form, ROWS - 1>(rows, runs, count, x, sums);
}

// Unpacks `count` runs of a panel from the packed blocks at `packed` on.
template <class Form>
__attribute__((noinline)) void unpack_runs(const char* packed, int count, const void* table, UnpackedRun* runs) {
    constexpr int RUNS = Form::INPUTS / GROUP_STEP, BYTES = Form::BYTES * PANEL;
    // Blocks of 256 inputs have several streams, whose next bytes a processor does not foresee: a store fetches a part of
    // the next block. 13 GB/s of q4_1, which has one, need nothing.
    constexpr int STEP = RUNS == UNPACKED_RUNS ? BYTES / 2 / (RUNS * 8) : 0;
    for (int run = 0; run < count; run += RUNS, packed += BYTES)
        for (int vector = 0; vector < 2; vector++) {
            PackedBlock block = {packed, vector, table, packed + BYTES + vector * (BYTES / 2), STEP};
            Form::unpack(block, runs + run);
        }
}

template <int32_t SCHEME>
void run_unpacked(const Linear& linear, const Activations& x, const Output& out, int first_panel, int end_panel) {
    using Form = Unpacking<SCHEME>;
    constexpr int TILE = UNPACKED_TILE, GROUPS = GROUP_STEP / Form::GROUP;
    UnpackedRun runs[UNPACKED_RUNS];
    alignas(64) float sums[UNPACKED_ROWS][PANEL];
    const int all_runs = linear.in_padded / GROUP_STEP;
    const int64_t panel_bytes = int64_t{linear.in_padded / Form::INPUTS} * Form::BYTES * PANEL;
    for (int first = 0; first < x.count; first += UNPACKED_ROWS) {
        const int rows = x.count - first < UNPACKED_ROWS ? x.count - first : UNPACKED_ROWS;
        for (int panel = first_panel; panel < end_panel; panel++) {
            const char* packed = static_cast<const char*>(linear.weights) + panel * panel_bytes;
            std::memset(sums, 0, sizeof(float) * static_cast<size_t>(rows) * PANEL);
            for (int run = 0; run < all_runs; run += UNPACKED_RUNS) {
                const int count = all_runs - run < UNPACKED_RUNS ? all_runs - run : UNPACKED_RUNS;
                const int64_t blocks = int64_t{run} * GROUP_STEP / Form::INPUTS;
                unpack_runs<Form>(packed + blocks * Form::BYTES * PANEL, count, linear.table, runs);
                for (int row = 0; row < rows; row += TILE) {
                    const int64_t r = first + row;
                    const char* values = static_cast<const char*>(x.rows) + r * x.row_bytes + run * GROUP_STEP;
                    const float* scales = x.scales + int64_t{run} * x.count + r;
                    const int32_t* totals = x.offsets + int64_t{run} * GROUPS * x.count + r;
                    const UnpackedInputs inputs = {values, x.row_bytes, scales, totals, x.count};
                    const int together = rows - row < TILE ? rows - row : TILE;
                    add_unpacked<Form, TILE>(together, runs, count, inputs, sums[row]);
                }
            }
            for (int row = 0; row < rows; row++) write_row(linear, out, first + row, panel * PANEL, sums[row], 2);
        }
    }
}

}  // namespace
