/*
 * Elementary functions in f64 whose bits do not depend on the C library: plain arithmetic in a
 * fixed order, no contraction. For the few places where one value per row or per table entry is
 * needed; what is needed per element is in simd.h.
 */
#ifndef GPU_WORKER_SCALAR_H
#define GPU_WORKER_SCALAR_H

/* ln x to 2 ulp; 0 gives -inf, negative and NaN give NaN, inf gives inf. */
double scalar_log(double x);

/* e^x to 2 ulp for |x| < 700. */
double scalar_exp(double x);

/* sin and cos to 2e-16 absolute for |x| < 2^25. */
void scalar_sine_cosine(double x, double *sine, double *cosine);

#endif
