#include "gpu_worker/scalar.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

static const double ln2_high = 0x1.62e42fefa38p-1; /* 44 bits: n * ln2_high is exact */
static const double ln2_low = 0x1.ef35793c7673p-45;

/*
 * x = 2^n m with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh(t), t = (m - 1) / (m + 1), |t| < 0.172:
 * 2 (t + t^3/3 + t^5/5 + ... + t^21/21), the next term being below 1e-18.
 */
double scalar_log(double x)
{
    if (!(x > 0))
        return x == 0 ? -INFINITY : NAN;
    if (isinf(x))
        return x;
    int n;
    double m = frexp(x, &n);
    if (m < 0x1.6a09e667f3bcdp-1) {
        m *= 2;
        n--;
    }
    double t = (m - 1) / (m + 1), square = t * t, series = 0;
    for (int k = 21; k >= 3; k -= 2)
        series = (series + 1.0 / k) * square;
    return n * ln2_high + (2 * t + (2 * t * series + n * ln2_low));
}

/* x = n ln 2 + r, |r| < 0.35; Taylor to r^14, the next term being below 1e-19. */
double scalar_exp(double x)
{
    double n = nearbyint(x * 0x1.71547652b82fep+0);
    double r = (x - n * ln2_high) - n * ln2_low;
    double series = 1;
    for (int k = 14; k >= 1; k--)
        series = 1 + series * r / k;
    return ldexp(series, (int)n);
}

/*
 * x = n pi/2 + r, |r| <= pi/4 (with pi/2 in three parts of 27, 27 and 53 bits, so that products
 * with n are exact), then Taylor series to r^19 and r^18 (next terms below 1e-19).
 */
void scalar_sine_cosine(double x, double *sine, double *cosine)
{
    double n = nearbyint(x * 0x1.45f306dc9c883p-1);
    double r = x - n * 0x1.921fb54p+0;
    r -= n * 0x1.10b4610000000p-30;
    r -= n * 0x1.a62633145c06ep-58;
    double square = r * r, s = 1, c = 1;
    for (int k = 18; k >= 2; k -= 2) {
        s = 1 - s * square / (k * (k + 1));
        c = 1 - c * square / (k * (k - 1));
    }
    s *= r;
    switch ((int64_t)n & 3) {
    case 0:
        *sine = s;
        *cosine = c;
        break;
    case 1:
        *sine = c;
        *cosine = -s;
        break;
    case 2:
        *sine = -s;
        *cosine = -c;
        break;
    default:
        *sine = -c;
        *cosine = s;
    }
}
