// The numbers that draws are decided by, as in draws.py: functions of (seed, position, token).
//
// Source: Salmon et al., Parallel Random Numbers, SC 2011 (Philox4x64-10). The key is the seed; the counter's lowest
// word counts blocks of four tokens from 1, the next one is the position.
#pragma once

#include "doubles.h"

namespace {

typedef uint64_t Word8 __attribute__((vector_size(64), aligned(8), may_alias));

// The 128-bit products of a constant and each lane: their high words and their low words.
template <uint64_t FACTOR>
ES_INLINE void multiply(uint64_t value, uint64_t& high, uint64_t& low) {
    const unsigned __int128 product = static_cast<unsigned __int128>(FACTOR) * value;
    high = static_cast<uint64_t>(product >> 64);
    low = static_cast<uint64_t>(product);
}

#if defined(__AVX512F__)
template <uint64_t FACTOR>
ES_INLINE void multiply(Word8 value, Word8& high, Word8& low) {
    const __m512i factor_low = _mm512_set1_epi64(FACTOR & 0xffffffffu), factor_high = _mm512_set1_epi64(FACTOR >> 32);
    const __m512i x = (__m512i)value, x_high = _mm512_srli_epi64(x, 32);
    const __m512i lows = _mm512_mul_epu32(x, factor_low);
    const Word8 upper = (Word8)_mm512_mul_epu32(x_high, factor_low) + (Word8)_mm512_srli_epi64(lows, 32);
    const Word8 lower = (Word8)_mm512_mul_epu32(x, factor_high) + (upper & 0xffffffffu);
    high = (Word8)_mm512_mul_epu32(x_high, factor_high) + (upper >> 32) + (lower >> 32);
    // The low half of `lower` above the low half of `lows`.
    low = (Word8)_mm512_mask_shuffle_epi32(lows, 0xaaaa, (__m512i)lower, _MM_PERM_CCAA);
}
#endif

// The numbers of 32 consecutive tokens.
struct Numbers {
    // Token 4 b + j has word [j][b].
    uint64_t words[4][8];
    // The highest 24 bits of each token's word, in order, as floats.
    Float16 tops[2];

    uint64_t word(int token) const { return words[token & 3][token >> 2]; }
};

class Philox {
   public:
    Philox(uint64_t seed, uint64_t position) : position_(position) {
        uint64_t first = seed, second = 0;
        for (auto& key : keys_) {
            key[0] = first, key[1] = second;
            first += 0x9E3779B97F4A7C15u;
            second += 0xBB67AE8584CAA73Bu;
        }
    }

    // Of tokens from 32 * group on.
    ES_INLINE void numbers(uint64_t group, Numbers& made) const {
        const uint64_t first = group * 8 + 1;
#if defined(__AVX512F__)
        Word8 words[4] = {Word8{0, 1, 2, 3, 4, 5, 6, 7} + first, Word8{} + position_, Word8{}, Word8{}};
        mix(words);
        std::memcpy(made.words, words, sizeof(words));
        // The high halves of words 0 and 1 side by side, those of 2 and 3, and both in turns.
        const __m512i even = _mm512_mask_shuffle_epi32((__m512i)words[1], 0x5555, (__m512i)words[0], _MM_PERM_DDBB);
        const __m512i odd = _mm512_mask_shuffle_epi32((__m512i)words[3], 0x5555, (__m512i)words[2], _MM_PERM_DDBB);
        const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), high = _mm512_add_epi64(low, _mm512_set1_epi64(4));
        const Word16 halves[2] = {(Word16)_mm512_permutex2var_epi64(even, low, odd),
                                  (Word16)_mm512_permutex2var_epi64(even, high, odd)};
#else
        Word16 halves[2];
        for (int b = 0; b < 8; b++) {
            uint64_t words[4] = {first + b, position_, 0, 0};
            mix(words);
            for (int j = 0; j < 4; j++) {
                made.words[j][b] = words[j];
                halves[b / 4][b % 4 * 4 + j] = static_cast<uint32_t>(words[j] >> 32);
            }
        }
#endif
        for (int i = 0; i < 2; i++) made.tops[i] = to_float((Int16)(halves[i] >> 8));
    }

   private:
    template <class Lane>
    ES_INLINE void mix(Lane (&x)[4]) const {
#pragma GCC unroll 10
        for (const auto& key : keys_) {
            Lane high[2], low[2];
            multiply<0xD2E7470EE14C6C93u>(x[0], high[0], low[0]);
            multiply<0xCA5A826395121157u>(x[2], high[1], low[1]);
            x[0] = high[1] ^ x[1] ^ key[0];
            x[1] = low[1];
            x[2] = high[0] ^ x[3] ^ key[1];
            x[3] = low[0];
        }
    }

    uint64_t position_;
    uint64_t keys_[10][2];
};

}  // namespace
