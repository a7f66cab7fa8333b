// Choosing a token from a row of logits: the definitions of draws.py in few passes over the row.
//
// A vocabulary is passed in blocks of 256 tokens, of which the first pass keeps sixteen maxima each, so that later ones
// skip what cannot matter. Exponentials and logarithms as exact as those of draws.py are computed only for the few tokens
// that a cheap bound does not rule out.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "kernels.h"
#include "philox.h"

namespace {

constexpr int BLOCK = 256;
// What is less likely than the likeliest by a factor of e^50 changes no sum of probabilities in double precision.
constexpr double NEGLIGIBLE_NATS = 50;
// A nucleus is nearly always among the tokens not less likely than the likeliest by a factor of e^8.
constexpr double NUCLEUS_NATS = 8;

constexpr float MOST_FLOAT = std::numeric_limits<float>::max();
constexpr double MINUS_INFINITY = -std::numeric_limits<double>::infinity();

ES_INLINE void put_lowest(uint16_t* address) { *address = 0xff80u; }
ES_INLINE void put_lowest(float* address) { *address = static_cast<float>(MINUS_INFINITY); }
ES_INLINE void put_lowest(double* address) { *address = MINUS_INFINITY; }

// Of each thread, kept between calls: the maxima of the row it surveyed last, and a row after penalties and biases.
thread_local std::vector<float> maxima_room;
thread_local std::vector<double> penalised_room;

// A row of logits in whole blocks: the last one is a copy, filled up with -infinity.
template <class T>
struct Row {
    Row(const T* logits, int32_t count) : values(logits), vocab(count), blocks((count + BLOCK - 1) / BLOCK) {
        const int whole = vocab / BLOCK * BLOCK;
        for (int i = 0; i < BLOCK; i++) {
            if (whole + i < vocab)
                tail[i] = values[whole + i];
            else
                put_lowest(tail + i);
        }
        maxima_room.resize(static_cast<size_t>(blocks) * LANES);
        maxima = maxima_room.data();
    }

    const T* block(int b) const { return (b + 1) * BLOCK <= vocab ? values + static_cast<int64_t>(b) * BLOCK : tail; }
    double at(int32_t token) const { return as_double(values[token]); }
    bool reaches(int b, float least) const { return at_least(load<Float16>(maxima + b * LANES), least) != 0; }

    const T* values;
    int32_t vocab, blocks;
    T tail[BLOCK];
    // Found by `survey`: of each block the largest of every sixteenth token, rounded to float; and the largest of all.
    float* maxima;
    double largest = 0;
};

// Calls visit(token, logit) in order for each token whose logit, rounded to float, is not below this.
template <class T, class Visit>
ES_INLINE void each_from(const Row<T>& row, float least, const Visit& visit) {
    for (int b = 0; b < row.blocks; b++) {
        if (!row.reaches(b, least)) continue;
        const T* block = row.block(b);
        for (int i = 0; i < BLOCK; i += LANES) {
            for (uint32_t bits = at_least(load_as_float(block + i), least); bits; bits &= bits - 1) {
                const int at = i + __builtin_ctz(bits);
                if (b * BLOCK + at < row.vocab) visit(b * BLOCK + at, as_double(block[at]));
            }
        }
    }
}

// Fills in `maxima` and `largest`. False where the largest logit is not finite as a float, or one is not a number.
template <class T>
bool survey(Row<T>& row) {
    Float16 all = splat(static_cast<float>(MINUS_INFINITY));
    uint32_t numbers = 0xffff;
    for (int b = 0; b < row.blocks; b++) {
        const T* block = row.block(b);
        Float16 most = splat(static_cast<float>(MINUS_INFINITY));
        for (int i = 0; i < BLOCK; i += LANES) {
            const Float16 x = load_as_float(block + i);
            numbers &= at_least(x, x);
            most = max16(x, most);
        }
        store(row.maxima + b * LANES, most);
        all = max16(all, most);
    }
    const float peak = max_lanes(all);
    row.largest = peak;
    if (numbers != 0xffff || !(peak >= -MOST_FLOAT && peak <= MOST_FLOAT)) return false;
    if (sizeof(T) == sizeof(double)) {
        row.largest = MINUS_INFINITY;
        each_from(row, peak, [&](int32_t, double value) { row.largest = std::max(row.largest, value); });
    }
    return true;
}

// The first token that has the largest logit.
template <class T>
int32_t likeliest(const Row<T>& row) {
    for (int b = 0; b < row.blocks; b++) {
        if (!row.reaches(b, static_cast<float>(row.largest))) continue;
        const T* block = row.block(b);
        for (int i = 0; i < BLOCK; i++)
            if (as_double(block[i]) == row.largest) return b * BLOCK + i;
    }
    return 0;
}

// The count-th largest logit; count is below the vocabulary's size.
template <class T>
double nth_largest(const Row<T>& row, int32_t count) {
    // So many maxima of disjoint sets are as large as the count-th of them: the logit wanted is not below it. Sets of 64
    // tokens where there are enough.
    std::vector<float> sets;
    for (int span : {4, 1}) {
        sets.clear();
        for (int b = 0; b < row.blocks; b += span) {
            Float16 most = load<Float16>(row.maxima + b * LANES);
            for (int i = b + 1; i < std::min(b + span, row.blocks); i++)
                most = max16(most, load<Float16>(row.maxima + i * LANES));
            for (int i = 0; i < LANES; i++) sets.push_back(most[i]);
        }
        if (static_cast<size_t>(count) <= sets.size()) break;
    }
    float least = static_cast<float>(MINUS_INFINITY);
    if (static_cast<size_t>(count) <= sets.size()) {
        std::nth_element(sets.begin(), sets.begin() + (count - 1), sets.end(), std::greater<float>());
        least = sets[count - 1];
    }
    std::vector<double> values;
    each_from(row, least, [&](int32_t, double value) { values.push_back(value); });
    std::nth_element(values.begin(), values.begin() + (count - 1), values.end(), std::greater<double>());
    return values[count - 1];
}

// Sums of probabilities up to a common factor: of logits not below `least`, and of those not below `likely` as well.
struct Mass {
    double all, likely;
};

// Over blocks [first, end), each block added up by itself: a sum of 150,000 terms then has 14 right digits.
template <class T>
Mass mass(const Row<T>& row, double temperature, int first, int end, double least, double likely) {
    const double inverse = std::min(1 / temperature, std::numeric_limits<double>::max());
    Mass found = {};
    for (int b = first; b < end; b++) {
        if (!row.reaches(b, static_cast<float>(least))) continue;
        const T* block = row.block(b);
        Doubles sums[2] = {}, likely_sums[2] = {};
        for (int i = 0; i < BLOCK; i += 2 * DOUBLES) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                const Doubles x = load_doubles(block + i + DOUBLES * part);
                const Doubles p = exp_doubles((x - row.largest) * inverse);
                sums[part] += where(x >= least, p);
                likely_sums[part] += where(x >= likely, p);
            }
        }
        found.all += sum_lanes(sums[0] + sums[1]);
        found.likely += sum_lanes(likely_sums[0] + likely_sums[1]);
    }
    return found;
}

// What is drawn from: logits above `least`, and those equal to it of tokens below `end`.
struct Limit {
    double least;
    int32_t end;

    bool has(int32_t token, double logit) const { return logit > least || (logit == least && token < end); }
};

template <class T>
ES_INLINE bool has_any(const T* group, float least) {
    Float16 most = load_as_float(group);
    for (int i = LANES; i < GROUP; i += LANES) most = max16(most, load_as_float(group + i));
    return at_least(most, least) != 0;
}

// The token that arrives first: the largest p / E, E = -ln(1 - u), of equal ones the first.
//
// E is not below u, and p = 2^x is not above the straight line between its values at the integers beside x, which is at
// most 6% above p and costs two operations. Where line / u is below the best p / E so far, with a margin for what floats
// round, the token has lost. Of a whole row some dozens have not, and their p and E are computed.
template <class T>
int32_t first_to_arrive(const Row<T>& row, double temperature, const Limit& limit, const Philox& philox) {
    const float unit = 8388608.0f;  // 2^23: a float's exponent counts these
    const float slope = static_cast<float>(std::min(1.4426950408889634 / temperature, 1e25)) * unit;
    const bool limited = limit.least > MINUS_INFINITY;
    const float least = static_cast<float>(limit.least);
    int32_t winner = -1;
    double best = 0;
    float bar = 0;
    Numbers numbers;
    for (int b = 0; b < row.blocks; b++) {
        if (!row.reaches(b, least)) continue;
        const T* block = row.block(b);
        for (int g = 0; g < BLOCK; g += GROUP) {
            if (limited && !has_any(block + g, least)) continue;
            philox.numbers((b * BLOCK + g) / GROUP, numbers);
            uint64_t open = 0;
            for (int i = 0; i < GROUP / LANES; i++) {
                Float16 line = fma16(difference(block + g + i * LANES, row.largest), splat(slope), splat(127 * unit));
                line = max16(line, splat(unit));
                const Float16 bound = (Float16)to_int(line);
                open |= uint64_t{at_least(bound, numbers.tops[i] * bar)} << (i * LANES);
            }
            for (; open; open &= open - 1) {
                const int at = __builtin_ctzll(open);
                const int32_t token = b * BLOCK + g + at;
                const double logit = as_double(block[g + at]);
                if (token >= row.vocab || !limit.has(token, logit)) continue;
                const double uniform = static_cast<double>(numbers.word(at) >> 11) * 0x1p-53;
                const double wait = std::max(-std::log1p(-uniform), std::numeric_limits<double>::min());
                const double rate = std::exp((logit - row.largest) / temperature) / wait;
                if (!(rate > best)) continue;
                best = rate;
                winner = token;
                bar = static_cast<float>(std::min(best * 0.999, double{MOST_FLOAT})) * 0x1p-24f;
            }
        }
    }
    return winner;
}

// The probability, up to the common factor, of all tokens before this one: of those with a larger logit, and of those
// with an equal one and a lower id.
template <class T>
double mass_before(const Row<T>& row, double temperature, int32_t token) {
    const double logit = row.at(token), above = std::nextafter(logit, std::numeric_limits<double>::infinity());
    const int own = token / BLOCK;
    const T* block = row.block(own);
    double before = mass(row, temperature, 0, own, logit, logit).all +
                    mass(row, temperature, own + 1, row.blocks, above, above).all;
    const Limit limit = {logit, token};
    for (int i = 0; i < BLOCK; i++)
        if (limit.has(own * BLOCK + i, as_double(block[i])))
            before += std::exp((as_double(block[i]) - row.largest) / temperature);
    return before;
}

// The nucleus is never listed. The first of all tokens to arrive is the nucleus's first if it is in the nucleus, and it is
// if the tokens likelier than it do not reach top_p. If they do, all less likely ones are outside as well, and the rest
// race again: 1 + ln(1 / top_p) races on average, most often one.
template <class T>
int32_t drawn(const Row<T>& row, const Choice& choice, uint64_t position) {
    const double temperature = choice.temperature;
    if (temperature == 0) return likeliest(row);
    const Philox philox(choice.seed, position);
    Limit limit = {MINUS_INFINITY, row.vocab};
    if (choice.top_k > 0 && choice.top_k < row.vocab) limit.least = nth_largest(row, choice.top_k);
    limit.least = std::max(limit.least, row.largest + choice.reach);
    if (choice.top_p >= 1) return first_to_arrive(row, temperature, limit, philox);
    const double likely = std::max(limit.least, row.largest - NUCLEUS_NATS * temperature);
    const double least = std::max(limit.least, row.largest - NEGLIGIBLE_NATS * temperature);
    const Mass sums = mass(row, temperature, 0, row.blocks, least, likely);
    const double goal = choice.top_p * sums.all;
    const bool within = sums.likely >= goal;  // the nucleus is within the likely tokens; otherwise they are within it
    if (within) limit.least = likely;
    for (;;) {
        const int32_t token = first_to_arrive(row, temperature, limit, philox);
        if (!within && row.at(token) >= likely) return token;
        if (mass_before(row, temperature, token) < goal) return token;
        limit = {row.at(token), token};
    }
}

// Writes the likeliest tokens, best first, and the logarithms of their probabilities. Returns the logarithm of the sum
// that all probabilities are divided by.
template <class T>
double logprobs(const Row<T>& row, const Choice& choice, int32_t* top_tokens, double* top_logprobs) {
    const double least = row.largest - NEGLIGIBLE_NATS;
    const double log_sum = std::log(mass(row, 1, 0, row.blocks, least, least).all);
    const int count = std::min(choice.top_logprobs, row.vocab);
    if (count == 0) return log_sum;
    const double edge = count < row.vocab ? nth_largest(row, count) : MINUS_INFINITY;
    std::vector<std::pair<double, int32_t>> best;
    each_from(row, static_cast<float>(edge), [&](int32_t token, double value) {
        if (value >= edge) best.emplace_back(-value, token);
    });
    std::partial_sort(best.begin(), best.begin() + count, best.end());
    for (int i = 0; i < count; i++) {
        top_tokens[i] = best[i].second;
        top_logprobs[i] = -best[i].first - row.largest - log_sum;
    }
    return log_sum;
}

// The row with the logits of seen tokens divided by the penalty where positive, multiplied where negative, and then with
// the offsets of moved ones added.
template <class T>
Row<double> penalised(const Row<T>& row, const Choice& choice) {
    penalised_room.resize(static_cast<size_t>(row.blocks) * BLOCK);
    double* logits = penalised_room.data();
    for (int b = 0; b < row.blocks; b++) {
        const T* block = row.block(b);
        for (int i = 0; i < BLOCK; i += DOUBLES) store(logits + b * BLOCK + i, load_doubles(block + i));
    }
    auto change = [&](int token) {
        double& logit = logits[token];
        if (choice.seen[token]) logit = logit > 0 ? logit / choice.penalty : logit * choice.penalty;
    };
    if (choice.seen) {
        int token = 0;
        for (; token + 8 <= row.vocab; token += 8)
            if (load<uint64_t>(choice.seen + token))
                for (int i = 0; i < 8; i++) change(token + i);
        for (; token < row.vocab; token++) change(token);
    }
    for (int i = 0; i < choice.moved_count; i++) logits[choice.moved[i]] += choice.offsets[i];
    return Row<double>(logits, row.vocab);
}

template <class T>
void sample_row(Row<T> row, const Choice& choice, uint64_t position, Sampled& out) {
    out.token = NOT_FINITE;
    if (!survey(row)) return;
    const bool wants = choice.logprobs || choice.top_logprobs > 0;
    const double log_sum = wants ? logprobs(row, choice, out.top_tokens, out.top_logprobs) : 0;
    if (!choice.seen && choice.moved_count == 0) {
        out.token = drawn(row, choice, position);
    } else {
        Row<double> other = penalised(row, choice);
        out.token = survey(other) ? drawn(other, choice, position) : NOT_TAKEN;
    }
    if (out.token >= 0 && wants) out.logprob = row.at(out.token) - row.largest - log_sum;
}

}  // namespace
