// CRC32C of what is read from the disk, by the processor's own instruction: a library that copies it first would take a
// part of the cores that compute meanwhile. The instruction takes three cycles, and can begin in each: three lanes of the
// data go side by side, and are put together at their end.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu.h"
#include "library.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#endif

namespace {

uint32_t by_table(uint32_t crc, const unsigned char* data, size_t size) {
    static const auto table = [] {
        std::array<uint32_t, 256> made{};
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t value = i;
            for (int bit = 0; bit < 8; bit++) value = (value >> 1) ^ (value & 1 ? 0x82f63b78u : 0u);
            made[i] = value;
        }
        return made;
    }();
    for (size_t i = 0; i < size; i++) crc = (crc >> 8) ^ table[(crc ^ data[i]) & 255];
    return crc;
}

// 32 KiB: the processor fetches ahead of each lane, and short lanes end before that helps.
constexpr size_t LANE_WORDS = 4096;

// What a checksum becomes by a lane of zeros. It is linear: the checksum's bytes each give a part.
uint32_t past_a_lane(uint32_t crc) {
    static const auto table = [] {
        std::array<uint32_t, 32> of_bit{};
        const std::array<unsigned char, 8 * LANE_WORDS> zeros{};
        for (int bit = 0; bit < 32; bit++) of_bit[bit] = by_table(1u << bit, zeros.data(), zeros.size());
        std::array<std::array<uint32_t, 256>, 4> made{};
        for (int byte = 0; byte < 4; byte++)
            for (uint32_t value = 0; value < 256; value++)
                for (int bit = 0; bit < 8; bit++)
                    if (value >> bit & 1) made[byte][value] ^= of_bit[8 * byte + bit];
        return made;
    }();
    return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^ table[3][crc >> 24];
}

uint64_t word_at(const unsigned char* data, size_t index) {
    uint64_t word;
    std::memcpy(&word, data + 8 * index, 8);
    return word;
}

#if defined(__x86_64__)
#if defined(__clang__)
#define ES_TARGET __attribute__((target("crc32")))
#else
#define ES_TARGET __attribute__((target("sse4.2")))
#endif
bool has_instruction() {
    static const bool has = this_cpu().crc32;
    return has;
}
ES_TARGET inline uint32_t one_word(uint32_t crc, uint64_t word) {
    return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
#elif defined(__aarch64__) && defined(__linux__)
#define ES_TARGET __attribute__((target("+crc")))
bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
ES_TARGET inline uint32_t one_word(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
#endif

#if defined(ES_TARGET)
ES_TARGET uint32_t by_words(uint32_t crc, const unsigned char* data, size_t words) {
    while (words >= 3 * LANE_WORDS) {
        uint32_t second = 0, third = 0;
        for (size_t i = 0; i < LANE_WORDS; i++) {
            crc = one_word(crc, word_at(data, i));
            second = one_word(second, word_at(data, i + LANE_WORDS));
            third = one_word(third, word_at(data, i + 2 * LANE_WORDS));
        }
        crc = past_a_lane(past_a_lane(crc) ^ second) ^ third;
        data += 3 * 8 * LANE_WORDS;
        words -= 3 * LANE_WORDS;
    }
    for (size_t i = 0; i < words; i++) crc = one_word(crc, word_at(data, i));
    return crc;
}
#else
bool has_instruction() { return false; }

uint32_t by_words(uint32_t crc, const unsigned char* data, size_t words) { return by_table(crc, data, 8 * words); }
#endif

}  // namespace

extern "C" uint32_t edgeshard_crc32c(const void* data, int64_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    const size_t words = has_instruction() ? static_cast<size_t>(size) / 8 : 0;
    uint32_t crc = by_words(~0u, bytes, words);
    return ~by_table(crc, bytes + 8 * words, static_cast<size_t>(size) - 8 * words);
}
