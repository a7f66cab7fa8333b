// The numbers that draws are decided by, as in draws.py: functions of (seed, position, token).
//
// Source: Salmon et al., Parallel Random Numbers, SC 2011 (Philox4x64-10). The key is the seed; the counter's lowest
// word counts blocks of four tokens from 1, the next one is the position.
#pragma once

#include "doubles.h"

namespace {

typedef uint64_t Word8 __attribute__((vector_size(64)));

// The 128-bit products of a constant and each lane: their high and their low words.
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

// Tokens whose numbers are made at once.
constexpr int GROUP = 64;

struct Numbers {
    // Of the group's token 4 b + j: [j][b].
    uint64_t words[4][GROUP / 4];
    // The highest 24 bits of each token's word, in order, as floats.
    Float16 tops[GROUP / LANES];

    uint64_t word(int token) const { return words[token & 3][token >> 2]; }
};

class Philox {
   public:
    Philox(uint64_t seed, uint64_t position) {
        uint64_t first = seed, second = 0;
        for (auto& key : keys_) {
            key[0] = first, key[1] = second;
            first += 0x9E3779B97F4A7C15u;
            second += 0xBB67AE8584CAA73Bu;
        }
        multiply<FIRST_FACTOR>(position ^ seed, constant_high_, constant_low_);
    }

    ES_INLINE void numbers(uint64_t group, Numbers& made) const {
        const uint64_t first = group * (GROUP / 4) + 1;
        Word16 halves[GROUP / LANES];
#if defined(__AVX512F__)
        const Word8 blocks = Word8{0, 1, 2, 3, 4, 5, 6, 7} + first;
        Word8 words[2][4] = {{blocks}, {blocks + 8}};
        mix(words);
        const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), high = _mm512_add_epi64(low, _mm512_set1_epi64(4));
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < 4; j++) store(&made.words[j][8 * i], words[i][j]);
            // The high halves of words 0 and 1 side by side, those of 2 and 3, and both in turns.
            const auto pair = [](Word8 a, Word8 b) {
                return _mm512_mask_shuffle_epi32((__m512i)b, 0x5555, (__m512i)a, _MM_PERM_DDBB);
            };
            const __m512i even = pair(words[i][0], words[i][1]), odd = pair(words[i][2], words[i][3]);
            halves[2 * i] = (Word16)_mm512_permutex2var_epi64(even, low, odd);
            halves[2 * i + 1] = (Word16)_mm512_permutex2var_epi64(even, high, odd);
        }
#else
        for (int b = 0; b < GROUP / 4; b++) {
            uint64_t words[1][4] = {{first + b}};
            mix(words);
            for (int j = 0; j < 4; j++) {
                made.words[j][b] = words[0][j];
                store(reinterpret_cast<uint32_t*>(halves) + 4 * b + j, static_cast<uint32_t>(words[0][j] >> 32));
            }
        }
#endif
        for (int i = 0; i < GROUP / LANES; i++) made.tops[i] = to_float((Int16)(halves[i] >> 8));
    }

   private:
    static constexpr uint64_t FIRST_FACTOR = 0xD2E7470EE14C6C93u, SECOND_FACTOR = 0xCA5A826395121157u;

    // Ten rounds on the counters (x[.][0], position, 0, 0), side by side because each waits for its own products. The
    // zeros make much of the first two rounds constant.
    template <class Lane, int COUNT>
    ES_INLINE void mix(Lane (&x)[COUNT][4]) const {
        for (auto& words : x) {
            Lane high[2], low[2];
            multiply<FIRST_FACTOR>(words[0], high[0], low[0]);
            multiply<SECOND_FACTOR>(high[0], high[1], low[1]);
            words[0] = high[1] ^ keys_[1][0];
            words[1] = low[1];
            words[2] = low[0] ^ (constant_high_ ^ keys_[1][1]);
            words[3] = Lane{} + constant_low_;
        }
#pragma GCC unroll 8
        for (int round = 2; round < 10; round++) {
#pragma GCC unroll 2
            for (int i = 0; i < COUNT; i++) {
                Lane high[2], low[2];
                multiply<FIRST_FACTOR>(x[i][0], high[0], low[0]);
                multiply<SECOND_FACTOR>(x[i][2], high[1], low[1]);
                x[i][0] = high[1] ^ x[i][1] ^ keys_[round][0];
                x[i][1] = low[1];
                x[i][2] = high[0] ^ x[i][3] ^ keys_[round][1];
                x[i][3] = low[0];
            }
        }
    }

    uint64_t constant_high_, constant_low_;
    uint64_t keys_[10][2];
};

}  // namespace
