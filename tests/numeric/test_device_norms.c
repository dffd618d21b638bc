/* RMSNorm, Gemma's RMSNorm and LayerNorm against a plain twin in f64 that rounds where transformers
 * does. */
#include "tests/numeric/test_device_fixture.h"

static const double epsilon = 1e-3;

struct norm_case {
    enum device_norm norm;
    uint64_t rows, width;
    int residual, bias;
};

/* Inputs, outputs, and the twin's outputs (e...). */
struct norm_run {
    struct norm_case c;
    struct device *device;
    float *x, *w, *bias, *y, *rstd, *dy, *dx, *dw, *dbias, *again, *residual, *scratch;
    double *ey, *eagain, *edx, *edw, *edbias;
};

static struct norm_run run_open(struct device *device, struct norm_case c)
{
    uint64_t n = c.rows * c.width;
    struct norm_run r = {.c = c, .device = device};
    r.x = numbers(device, n, 1);
    for (uint64_t i = 0; i < n; i++) /* a mean that is not nearly zero */
        r.x[i] = (float)rounded(device, (double)r.x[i] + 0.75);
    r.w = numbers(device, c.width, 1);
    r.bias = numbers(device, c.width, 1);
    r.y = numbers(device, n, 1);
    r.rstd = numbers(device, c.rows, 1);
    r.dy = numbers(device, n, 1);
    r.dx = numbers(device, n, 1);
    r.dw = numbers(devices[0], c.width, 1);
    r.dbias = numbers(devices[0], c.width, 1);
    r.again = numbers(device, n, 1);
    r.residual = numbers(device, n, 1);
    r.scratch = floats(device_norm_scratch(c.norm, c.rows, c.width));
    r.ey = zeros(n);
    r.eagain = zeros(n);
    r.edx = zeros(n);
    r.edw = zeros(c.width);
    r.edbias = zeros(c.width);
    for (uint64_t i = 0; i < c.width; i++) {
        r.edw[i] = (double)r.dw[i];
        r.edbias[i] = (double)r.dbias[i];
    }
    return r;
}

static void run_close(struct norm_run *r)
{
    float *all[] = {r->x,  r->w,  r->bias,  r->y,     r->rstd,     r->dy,
                    r->dx, r->dw, r->dbias, r->again, r->residual, r->scratch};
    for (uint64_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* One row of the twin. */
static void twin_row(struct norm_run *r, uint64_t row)
{
    const struct norm_case *c = &r->c;
    const float *x = r->x + row * c->width, *dy = r->dy + row * c->width;
    double C = (double)c->width, mean = 0, squares = 0, sum_g = 0, sum_gx = 0;
    double plus = c->norm == DEVICE_RMSNORM_PLUS ? 1 : 0;
    int layer = c->norm == DEVICE_LAYERNORM, inside = c->norm == DEVICE_RMSNORM;
    for (uint64_t i = 0; layer && i < c->width; i++)
        mean += (double)x[i] / C;
    for (uint64_t i = 0; i < c->width; i++)
        squares += pow((double)x[i] - mean, 2);
    double s = 1 / sqrt(squares / C + epsilon);
    for (uint64_t pass = 0; pass < 2; pass++)
        for (uint64_t i = 0; i < c->width; i++) {
            uint64_t at = row * c->width + i;
            double a = (double)r->w[i] + plus, center = (double)x[i] - mean;
            double n = inside ? rounded(r->device, center * s) : center * s;
            double g = inside ? rounded(r->device, (double)dy[i] * a) : (double)dy[i] * a;
            if (pass == 0) {
                sum_g += layer ? g : 0;
                sum_gx += g * center;
                r->edw[i] += (double)dy[i] * n;
                r->edbias[i] += (double)dy[i];
                continue;
            }
            double y = rounded(r->device, a * n + (c->bias ? (double)r->bias[i] : 0));
            double dx = rounded(r->device, s * (g - sum_g / C - center * s * s * sum_gx / C));
            double residual = (double)r->residual[at];
            r->eagain[at] = y;
            r->ey[at] = c->residual ? rounded(r->device, residual + y) : y;
            r->edx[at] = c->residual ? rounded(r->device, residual + dx) : dx;
        }
}

static void run_device(struct norm_run *r, struct device *device)
{
    const struct norm_case *c = &r->c;
    device->ops->norm_forward(
        device, &(struct device_norm_forward){.norm = c->norm,
                                              .epsilon = (float)epsilon,
                                              .rows = c->rows,
                                              .width = c->width,
                                              .y = cells(r->y),
                                              .rstd = r->rstd,
                                              .x = cells(r->x),
                                              .w = cells(r->w),
                                              .bias = c->bias ? cells(r->bias) : NULL,
                                              .residual = c->residual ? cells(r->residual) : NULL});
    device->ops->norm_backward(
        device, &(struct device_norm_backward){.norm = c->norm,
                                               .dx = cells(r->dx),
                                               .dw = r->dw,
                                               .dbias = c->bias ? r->dbias : NULL,
                                               .y_again = cells(r->again),
                                               .dy = cells(r->dy),
                                               .x = cells(r->x),
                                               .w = cells(r->w),
                                               .bias = c->bias ? cells(r->bias) : NULL,
                                               .rstd = r->rstd,
                                               .residual = c->residual ? cells(r->residual) : NULL,
                                               .scratch = r->scratch,
                                               .rows = c->rows,
                                               .width = c->width});
}

static void check_norm(int d, struct norm_case c)
{
    uint64_t state = random_state, n = c.rows * c.width;
    struct norm_run r = run_open(devices[d], c);
    for (uint64_t row = 0; row < c.rows; row++)
        twin_row(&r, row);
    run_device(&r, devices[d]);
    random_state = state;
    struct norm_run other = run_open(alone[d], c);
    run_device(&other, alone[d]);
    assert_memory_equal(other.y, r.y, n * sizeof *r.y);
    assert_memory_equal(other.dx, r.dx, n * sizeof *r.dx);
    assert_memory_equal(other.dw, r.dw, c.width * sizeof *r.dw);
    assert_memory_equal(other.dbias, r.dbias, c.width * sizeof *r.dbias);
    double *none[] = {other.ey, other.eagain, other.edx, other.edw, other.edbias};
    for (int i = 0; i < 5; i++)
        free(none[i]);
    run_close(&other);
    check_rounding("y", devices[d], r.y, r.ey, n);
    check_rounding("y again", devices[d], r.again, r.eagain, n);
    check_rounding("dx", devices[d], r.dx, r.edx, n);
    /* where n is rounded, a tie that falls otherwise is seen here */
    int ties = c.norm == DEVICE_RMSNORM && d == 1;
    check("dw", devices[ties], r.dw, r.edw, c.width, DEVICE_F32, ties ? 0.2 : 2);
    if (c.bias)
        check("dbias", devices[0], r.dbias, r.edbias, c.width, DEVICE_F32, 2);
    else
        free(r.edbias);
    assert_true(r.scratch[device_norm_scratch(c.norm, c.rows, c.width)] == 12345.0f);
    assert_true(r.rstd[c.rows] == 12345.0f);
    run_close(&r);
}

static void check_kind(enum device_norm norm, int bias)
{
    for (int d = 0; d < 2; d++)
        for (int residual = 0; residual < 2; residual++) {
            for (uint64_t width = 5; width < 200; width = width * 3 + 2)
                check_norm(d, (struct norm_case){norm, 131, width, residual, bias});
            check_norm(d, (struct norm_case){norm, 1, 64, residual, bias});
        }
}

static void rmsnorm_and_its_gradients_match_the_twin(void **state)
{
    (void)state;
    check_kind(DEVICE_RMSNORM, 0);
}

static void gemmas_rmsnorm_is_one_product_of_f32_rounded_once(void **state)
{
    (void)state;
    check_kind(DEVICE_RMSNORM_PLUS, 0);
}

static void layernorm_and_its_gradients_match_the_twin(void **state)
{
    (void)state;
    check_kind(DEVICE_LAYERNORM, 1);
    check_kind(DEVICE_LAYERNORM, 0);
}

/* A q/k norm: a row is one head, the weight's gradient is over all of them. */
static void a_norm_per_head_is_a_norm_of_rows_times_heads(void **state)
{
    (void)state;
    check_norm(0, (struct norm_case){DEVICE_RMSNORM, 37 * 6, 16, 0, 0});
    check_norm(1, (struct norm_case){DEVICE_RMSNORM, 37 * 6, 16, 0, 0});
    check_norm(1, (struct norm_case){DEVICE_RMSNORM_PLUS, 37 * 3, 24, 0, 0});
}

/* As the block template calls them: y over x; dx over dy; y again over x. */
static void norms_work_in_place(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++)
        for (int kind = 0; kind < 3; kind++) {
            struct norm_case c = {(enum device_norm)kind, 70, 45, 0, kind == DEVICE_LAYERNORM};
            uint64_t start = random_state, n = c.rows * c.width;
            struct norm_run apart = run_open(devices[d], c);
            run_device(&apart, devices[d]);
            random_state = start;
            struct norm_run over = run_open(devices[d], c);
            float *x = over.x, *dy = over.dy, *dx = over.dx, *again = over.again;
            over.dx = dy;
            over.again = x;
            run_device(&over, devices[d]);
            assert_memory_equal(over.dx, apart.dx, n * sizeof *dx);
            assert_memory_equal(over.again, apart.again, n * sizeof *dx);
            random_state = start;
            struct norm_run fresh = run_open(devices[d], c);
            memcpy(x, fresh.x, n * sizeof *x);
            float *y = over.y;
            over.y = x;
            over.again = again;
            over.dx = dx;
            run_device(&over, devices[d]);
            assert_memory_equal(over.y, apart.y, n * sizeof *x);
            over.y = y;
            over.dy = dy;
            struct norm_run *all[] = {&apart, &over, &fresh};
            for (int i = 0; i < 3; i++) {
                double *twin[] = {all[i]->ey, all[i]->eagain, all[i]->edx, all[i]->edw,
                                  all[i]->edbias};
                for (int j = 0; j < 5; j++)
                    free(twin[j]);
                run_close(all[i]);
            }
        }
}

static void no_rows_change_nothing(void **state)
{
    (void)state;
    float w[4] = {1, 2, 3, 4}, dw[4] = {-0.0f, 1, 2, 3}, bias[4] = {-0.0f, 1, 2, 3};
    float before[4] = {-0.0f, 1, 2, 3};
    struct device *device = devices[0];
    device->ops->norm_backward(
        device, &(struct device_norm_backward){
                    .norm = DEVICE_LAYERNORM, .dw = dw, .dbias = bias, .w = cells(w), .width = 4});
    device->ops->linear_backward_bias(device, bias, NULL, 0, 4);
    assert_memory_equal(dw, before, sizeof dw);
    assert_memory_equal(bias, before, sizeof bias);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rmsnorm_and_its_gradients_match_the_twin),
        cmocka_unit_test(gemmas_rmsnorm_is_one_product_of_f32_rounded_once),
        cmocka_unit_test(layernorm_and_its_gradients_match_the_twin),
        cmocka_unit_test(a_norm_per_head_is_a_norm_of_rows_times_heads),
        cmocka_unit_test(norms_work_in_place),
        cmocka_unit_test(no_rows_change_nothing),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
