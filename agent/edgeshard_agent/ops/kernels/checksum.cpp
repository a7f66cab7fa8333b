// CRC32C of what is read from the disk, by the processor's own instruction: a library that copies it first would take a
// part of the cores that compute meanwhile.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

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

#if defined(__x86_64__)
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }

__attribute__((target("sse4.2"))) uint32_t by_words(uint32_t crc, const unsigned char* data, size_t words) {
    uint64_t wide = crc;
    for (size_t i = 0; i < words; i++) {
        uint64_t word;
        std::memcpy(&word, data + 8 * i, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    return static_cast<uint32_t>(wide);
}
#elif defined(__aarch64__) && defined(__linux__)
bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

__attribute__((target("+crc"))) uint32_t by_words(uint32_t crc, const unsigned char* data, size_t words) {
    for (size_t i = 0; i < words; i++) {
        uint64_t word;
        std::memcpy(&word, data + 8 * i, 8);
        crc = __crc32cd(crc, word);
    }
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
