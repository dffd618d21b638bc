#include "model/random.h"

#include <math.h>
#include <string.h>

#include "procs/check.h"

enum { PHILOX_ROUNDS = 10, PERMUTE_ROUNDS = 8 };

void random_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u; /* the golden ratio and sqrt(3) - 1, as published */
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* What (seed, purpose, step, layer) is boiled down to: 64 bits of key, 64 of the counter. */
struct stream {
    uint32_t key[2];
    uint32_t upper[2];
};

static struct stream stream_of(struct random_key key)
{
    uint32_t name[4] = {key.purpose, key.layer, (uint32_t)key.step, (uint32_t)(key.step >> 32)};
    uint32_t seed[2] = {(uint32_t)key.seed, (uint32_t)(key.seed >> 32)};
    uint32_t words[4];
    random_philox(name, seed, words);
    return (struct stream){.key = {words[0], words[1]}, .upper = {words[2], words[3]}};
}

/* Elements 4 * group .. 4 * group + 3 */
static void stream_group(const struct stream *stream, uint64_t group, uint32_t out[4])
{
    uint32_t counter[4] = {(uint32_t)group, (uint32_t)(group >> 32), stream->upper[0],
                           stream->upper[1]};
    random_philox(counter, stream->key, out);
}

static uint32_t stream_element(const struct stream *stream, uint64_t element)
{
    uint32_t words[4];
    stream_group(stream, element / 4, words);
    return words[element % 4];
}

void random_bits_fill(struct random_key key, uint64_t first_element, uint64_t n, uint32_t *out)
{
    struct stream stream = stream_of(key);
    uint32_t words[4];
    for (uint64_t i = 0; i < n; i++) {
        uint64_t element = first_element + i;
        if (i == 0 || element % 4 == 0)
            stream_group(&stream, element / 4, words);
        out[i] = words[element % 4];
    }
}

static double open_unit_interval(uint32_t bits)
{
    return ((double)bits + 0.5) * 0x1p-32;
}

double random_uniform(struct random_key key, uint64_t element)
{
    struct stream stream = stream_of(key);
    return open_unit_interval(stream_element(&stream, element));
}

/*
 * Natural logarithm of a positive normal double. x = m 2^e with m in [sqrt(1/2), sqrt(2)), then
 * log m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.1716: eleven terms leave less than 1e-17.
 */
static double own_log(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | 0x3ff0000000000000u;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m >= 1.4142135623730951) {
        m *= 0.5;
        exponent++;
    }
    static const double odd_inverse[11] = {1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17,
                                           1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9,
                                           1.0 / 7,  1.0 / 5,  1.0 / 3};
    double s = (m - 1.0) / (m + 1.0);
    double z = s * s;
    double sum = 0.0;
    for (int i = 0; i < 11; i++)
        sum = (sum + odd_inverse[i]) * z;
    const double ln2_high = 0x1.62e42fefa38p-1; /* 11 trailing zero bits: exponent * it is exact */
    const double ln2_low = 0x1.ef35793c7673p-45;
    double e = (double)exponent;
    return e * ln2_high + (2.0 * s + (2.0 * s * sum + e * ln2_low));
}

/* numerator(x) / denominator(x), coefficients from the constant up, denominator's constant is 1 */
struct rational {
    double numerator[8];
    double denominator[7];
};

static double rational_at(const struct rational *f, double x)
{
    double top = f->numerator[7];
    for (int i = 6; i >= 0; i--)
        top = top * x + f->numerator[i];
    double bottom = f->denominator[6];
    for (int i = 5; i >= 0; i--)
        bottom = bottom * x + f->denominator[i];
    return top / (bottom * x + 1.0);
}

/* M. Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied
 * Statistics 37 (1988), PPND16: centre, near tail, far tail. */
static const struct rational quantile_centre = {
    {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
     1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
     3.3430575583588128105e4, 2.5090809287301226727e3},
    {4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
     5.2264952788528545610e3},
};
static const struct rational quantile_near = {
    {1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
     3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
     2.27238449892691845833e-2, 7.74545014278341407640e-4},
    {2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
     1.05075007164441684324e-9},
};
static const struct rational quantile_far = {
    {6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
     2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
     2.71155556874348757815e-5, 2.01033439929228813265e-7},
    {5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
     2.04426310338993978564e-15},
};

double random_normal_quantile(double p)
{
    double q = p - 0.5;
    if (q >= -0.425 && q <= 0.425)
        return q * rational_at(&quantile_centre, 0.180625 - q * q);
    double r = sqrt(-own_log(q < 0 ? p : 1.0 - p)); /* IEEE 754 rounds sqrt exactly */
    double x =
        r <= 5.0 ? rational_at(&quantile_near, r - 1.6) : rational_at(&quantile_far, r - 5.0);
    return q < 0 ? -x : x;
}

void random_normal_fill(struct random_key key, uint64_t first_element, uint64_t n, float *out,
                        float stddev)
{
    struct stream stream = stream_of(key);
    uint32_t words[4];
    for (uint64_t i = 0; i < n; i++) {
        uint64_t element = first_element + i;
        if (i == 0 || element % 4 == 0)
            stream_group(&stream, element / 4, words);
        double p = open_unit_interval(words[element % 4]);
        out[i] = (float)(random_normal_quantile(p) * (double)stddev);
    }
}

/* One pass of the network over [0, 2^(2 half_bits)). */
static uint64_t feistel(const struct stream *stream, unsigned half_bits, uint64_t value)
{
    uint32_t mask = (uint32_t)(((uint64_t)1 << half_bits) - 1);
    uint32_t left = (uint32_t)(value >> half_bits);
    uint32_t right = (uint32_t)value & mask;
    for (uint64_t round = 0; round < PERMUTE_ROUNDS; round++) {
        uint32_t words[4];
        stream_group(stream, (round << 32) | right, words);
        uint32_t next = left ^ (words[0] & mask);
        left = right;
        right = next;
    }
    return ((uint64_t)left << half_bits) | right;
}

uint64_t random_permute(uint64_t seed, uint64_t epoch, uint64_t n, uint64_t index)
{
    CHECK(index < n);
    CHECK(n <= (uint64_t)1 << 62);
    unsigned half_bits = 1;
    while ((uint64_t)1 << (2 * half_bits) < n)
        half_bits++;
    struct random_key key = {.seed = seed, .step = epoch, .purpose = RANDOM_SHUFFLE};
    struct stream stream = stream_of(key);
    do
        index = feistel(&stream, half_bits, index);
    while (index >= n); /* ends: the cycle through index < n comes back to [0, n) */
    return index;
}
