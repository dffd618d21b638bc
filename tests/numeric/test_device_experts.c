/* Mixture of experts against a plain twin in f64: routing, the ways of rows, the router's gradient.
 * An expert here multiplies its rows by one factor. */
#include "tests/numeric/test_device_fixture.h"

enum { R = 70, E = 11, K = 3, C = 45, EMPTY = 4, N = R * K };

struct moe {
    struct device_router shape;
    float *logits, *probabilities, *weights;
    int32_t *experts, *slots, *first;
    double *balance;
};

static int32_t *integers(uint64_t n)
{
    int32_t *x = calloc(n, sizeof *x);
    assert_non_null(x);
    return x;
}

/* Expert EMPTY is nobody's choice; experts 0 and 1 always tie; rows 8.. have no ties otherwise. */
static struct moe moe_open(const struct device *device, enum device_router_scale scale,
                           enum device_router_round round)
{
    struct moe m = {.shape = {R, E, K, C, scale, round},
                    .logits = numbers(device, (uint64_t)R * E, 3),
                    .probabilities = floats((uint64_t)R * E),
                    .weights = floats(N),
                    .experts = integers(N),
                    .slots = integers(N),
                    .first = integers(E + 1),
                    .balance = zeros((uint64_t)2 * E)};
    for (uint64_t row = 0; row < R; row++) {
        m.logits[row * E + EMPTY] = -16;
        m.logits[row * E + 1] = m.logits[row * E];
    }
    return m;
}

static void moe_close(struct moe *m)
{
    free(m->logits);
    free(m->probabilities);
    free(m->weights);
    free(m->experts);
    free(m->slots);
    free(m->first);
    free(m->balance);
}

static void route(struct device *device, struct moe *m)
{
    device->ops->router_forward(device,
                                &(struct device_router_forward){.logits = cells(m->logits),
                                                                .probabilities = m->probabilities,
                                                                .weights = m->weights,
                                                                .experts = m->experts,
                                                                .slots = m->slots,
                                                                .first = m->first,
                                                                .balance = m->balance},
                                m->shape);
}

/* p (E) of a row and, in order, its K experts and their weights */
struct routed {
    double p[E], weight[K], total;
    uint64_t expert[K];
};

static struct routed twin_route(const struct moe *m, const float *logits)
{
    struct routed t = {.total = 0};
    double sum = 0;
    int taken[E] = {0};
    for (uint64_t e = 0; e < E; e++)
        sum += exp((double)logits[e]);
    for (uint64_t e = 0; e < E; e++)
        t.p[e] = exp((double)logits[e]) / sum;
    for (uint64_t k = 0; k < K; k++) {
        uint64_t best = E;
        for (uint64_t e = 0; e < E; e++)
            if (!taken[e] && (best == E || logits[e] > logits[best]))
                best = e;
        taken[best] = 1;
        t.expert[k] = best;
        t.total += t.p[best];
    }
    for (uint64_t k = 0; k < K; k++) {
        double total = m->shape.scale == DEVICE_ROUTER_NORMALIZED ? t.total : 1;
        t.weight[k] = t.p[t.expert[k]] / total;
    }
    return t;
}

static void check_routing(int d, enum device_router_scale scale, enum device_router_round round)
{
    uint64_t start = random_state;
    struct moe m = moe_open(devices[d], scale, round);
    random_state = start;
    struct moe other = moe_open(devices[d], scale, round);
    double counts[E] = {0}, sums[E] = {0}, *weights = zeros(N);
    for (uint64_t i = 2; i < 2 * E; i += E) /* what other layers counted */
        m.balance[i] = other.balance[i] = 1000;
    route(devices[d], &m);
    route(alone[d], &other);
    for (uint64_t row = 0; row < R; row++) {
        struct routed t = twin_route(&m, m.logits + row * E);
        for (uint64_t k = 0; k < K; k++) {
            assert_int_equal(m.experts[row * K + k], t.expert[k]);
            counts[t.expert[k]]++;
            weights[row * K + k] =
                round == DEVICE_ROUTER_ROUNDED ? rounded(devices[d], t.weight[k]) : t.weight[k];
        }
        for (uint64_t e = 0; e < E; e++)
            sums[e] += t.p[e];
    }
    for (uint64_t e = 0; e < E; e++) {
        assert_true(m.balance[e] == counts[e] + (e == 2 ? 1000 : 0));
        double counted = m.balance[E + e] - (e == 2 ? 1000 : 0);
        assert_true(fabs(counted - sums[e]) <= 1e-6 * sums[e]);
        assert_true(m.first[e + 1] - m.first[e] == (int32_t)counts[e]);
        for (int32_t i = m.first[e]; i < m.first[e + 1]; i++) {
            assert_int_equal(m.experts[m.slots[i]], e);
            assert_true(i == m.first[e] || m.slots[i - 1] < m.slots[i]);
        }
    }
    assert_true(m.first[0] == 0 && m.first[E] == N && counts[EMPTY] == 0);
    if (round == DEVICE_ROUTER_ROUNDED)
        check_rounding("weights", devices[d], m.weights, weights, N);
    else
        check("weights", devices[0], m.weights, weights, N, DEVICE_F32, 1);
    assert_memory_equal(other.weights, m.weights, N * sizeof *m.weights);
    assert_memory_equal(other.balance, m.balance, 2 * E * sizeof *m.balance);
    assert_memory_equal(other.slots, m.slots, N * sizeof *m.slots);
    moe_close(&m);
    moe_close(&other);
}

static void tokens_go_to_their_most_likely_experts(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++) {
        check_routing(d, DEVICE_ROUTER_AS_IS, DEVICE_ROUTER_F32);
        check_routing(d, DEVICE_ROUTER_NORMALIZED, DEVICE_ROUTER_F32);
        check_routing(d, DEVICE_ROUTER_NORMALIZED, DEVICE_ROUTER_ROUNDED);
    }
}

static void all_logits_equal_or_none_a_number_choose_the_first_experts(void **state)
{
    (void)state;
    static const float values[] = {0, 5, NAN, INFINITY, -INFINITY};
    for (uint64_t v = 0; v < sizeof values / sizeof values[0]; v++) {
        struct moe m = moe_open(devices[0], DEVICE_ROUTER_NORMALIZED, DEVICE_ROUTER_F32);
        for (uint64_t i = 0; i < (uint64_t)R * E; i++)
            m.logits[i] = values[v];
        route(devices[0], &m);
        for (int32_t i = 0; i < N; i++)
            assert_int_equal(m.experts[i], i % K);
        moe_close(&m);
    }
}

static float factor_of(uint64_t expert)
{
    return (float)expert * 0.5f - 2.0f;
}

/* The block of a mixture, forward and backward, as device.h writes it. */
struct block {
    float *x, *out, *dout, *dx, *dweights, *xe, *ye;
    float factor_gradient[E];
};

static struct block block_open(const struct device *device)
{
    uint64_t n = (uint64_t)R * C;
    return (struct block){.x = numbers(device, n, 1),
                          .out = floats(n),
                          .dout = numbers(device, n, 1),
                          .dx = floats(n),
                          .dweights = floats(N),
                          .xe = floats(n),
                          .ye = floats(n)};
}

static void block_close(struct block *b)
{
    float *all[] = {b->x, b->out, b->dout, b->dx, b->dweights, b->xe, b->ye};
    for (int i = 0; i < 7; i++)
        free(all[i]);
}

static void multiply(const struct device *device, float *y, const float *x, uint64_t n,
                     float factor)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] = (float)rounded(device, (double)(x[i] * factor));
}

static void run_block(struct device *device, const struct moe *m, struct block *b)
{
    for (uint64_t e = 0; e < E; e++) {
        const int32_t *slots = m->slots + m->first[e];
        uint64_t n = (uint64_t)(m->first[e + 1] - m->first[e]);
        device->ops->expert_gather(device, cells(b->xe), cells(b->x), slots, n, m->shape);
        multiply(device, b->ye, b->xe, n * C, factor_of(e));
        device->ops->expert_scatter(device, cells(b->out), cells(b->ye), m->weights, slots, n,
                                    m->shape);
    }
    for (uint64_t e = E; e-- > 0;) {
        const int32_t *slots = m->slots + m->first[e];
        uint64_t n = (uint64_t)(m->first[e + 1] - m->first[e]);
        device->ops->expert_gather(device, cells(b->xe), cells(b->x), slots, n, m->shape);
        multiply(device, b->ye, b->xe, n * C, factor_of(e));
        device->ops->expert_scatter_backward(
            device,
            &(struct device_expert_scatter_backward){.dfrom = cells(b->ye),
                                                     .dweights = b->dweights,
                                                     .dto = cells(b->dout),
                                                     .from = cells(b->ye),
                                                     .weights = m->weights,
                                                     .slots = slots,
                                                     .n = n},
            m->shape);
        for (uint64_t i = 0; i < n * C; i++)
            b->factor_gradient[e] += b->ye[i] * b->xe[i];
        multiply(device, b->xe, b->ye, n * C, factor_of(e));
        device->ops->expert_scatter(device, cells(b->dx), cells(b->xe), NULL, slots, n, m->shape);
    }
}

/* The same, row by row: expert after expert forward, and in the other direction backward. */
static void twin_block(const struct device *device, const struct moe *m, const struct block *b,
                       double *out, double *dx, double *dweights)
{
    int weights_rounded = m->shape.round == DEVICE_ROUTER_ROUNDED;
    for (uint64_t row = 0; row < R; row++)
        for (uint64_t turn = 0; turn < (uint64_t)2 * E; turn++) {
            uint64_t e = turn < E ? turn : 2 * E - 1 - turn;
            for (uint64_t slot = row * K; slot < (row + 1) * K; slot++) {
                if ((uint64_t)m->experts[slot] != e)
                    continue;
                for (uint64_t i = row * C; i < (row + 1) * C; i++) {
                    double w = (double)m->weights[slot], f = (double)factor_of(e);
                    double y = rounded(device, (double)b->x[i] * f);
                    if (turn < E) {
                        out[i] = rounded(device, out[i] + rounded(device, y * w));
                        continue;
                    }
                    double dy = rounded(device, (double)b->dout[i] * w);
                    double product = (double)b->dout[i] * y;
                    dweights[slot] += weights_rounded ? rounded(device, product) : product;
                    dx[i] = rounded(device, dx[i] + rounded(device, dy * f));
                }
                if (turn >= E && weights_rounded)
                    dweights[slot] = rounded(device, dweights[slot]);
            }
        }
}

static void check_block(int d, enum device_router_round round)
{
    struct device *device = devices[d];
    struct moe m = moe_open(device, DEVICE_ROUTER_NORMALIZED, round);
    uint64_t start = random_state, n = (uint64_t)R * C;
    struct block b = block_open(device);
    random_state = start;
    struct block other = block_open(device);
    double *out = zeros(n), *dx = zeros(n), *dweights = zeros(N);
    route(device, &m);
    run_block(device, &m, &b);
    run_block(alone[d], &m, &other);
    assert_memory_equal(other.out, b.out, n * sizeof *b.out);
    assert_memory_equal(other.dx, b.dx, n * sizeof *b.dx);
    assert_memory_equal(other.dweights, b.dweights, N * sizeof *b.dweights);
    twin_block(device, &m, &b, out, dx, dweights);
    check_rounding("out", device, b.out, out, n);
    check_rounding("dx", device, b.dx, dx, n);
    if (round == DEVICE_ROUTER_ROUNDED)
        check_rounding("dweights", device, b.dweights, dweights, N);
    else
        check("dweights", devices[0], b.dweights, dweights, N, DEVICE_F32, 2);
    for (uint64_t e = 0; e < E; e++)
        assert_true((b.factor_gradient[e] == 0.0f) == (e == EMPTY || factor_of(e) == 0.0f));
    block_close(&b);
    block_close(&other);
    moe_close(&m);
}

static void experts_gather_their_rows_and_scatter_what_they_make(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++) {
        check_block(d, DEVICE_ROUTER_F32);
        check_block(d, DEVICE_ROUTER_ROUNDED);
    }
}

static void check_router_gradient(int d, enum device_router_scale scale, int balanced)
{
    struct device *device = devices[d];
    struct moe m = moe_open(device, scale, DEVICE_ROUTER_F32);
    uint64_t n = (uint64_t)R * E;
    float *dweights = numbers(devices[0], N, 1), *slope = numbers(devices[0], E, 1);
    float *found = floats(n), *again = floats(n);
    double *expected = zeros(n);
    route(device, &m);
    for (uint64_t row = 0; row < R; row++) {
        struct routed t = twin_route(&m, m.logits + row * E);
        double dp[E] = {0}, dot = 0, slope_dot = 0, weights_dot = 0;
        const float *dw = dweights + row * K;
        for (uint64_t k = 0; k < K; k++)
            weights_dot += (double)dw[k] * t.p[t.expert[k]] / t.total;
        for (uint64_t k = 0; k < K; k++)
            dp[t.expert[k]] = scale == DEVICE_ROUTER_NORMALIZED
                                  ? ((double)dw[k] - weights_dot) / t.total
                                  : (double)dw[k];
        for (uint64_t e = 0; e < E; e++) {
            dot += t.p[e] * dp[e];
            slope_dot += t.p[e] * (double)slope[e];
        }
        for (uint64_t e = 0; e < E; e++) {
            double weights_part = rounded(device, t.p[e] * (dp[e] - dot));
            double part = rounded(device, t.p[e] * ((double)slope[e] - slope_dot));
            expected[row * E + e] = balanced ? rounded(device, part + weights_part) : weights_part;
        }
    }
    struct device_router_backward args = {.dlogits = cells(found),
                                          .dweights = dweights,
                                          .logits = cells(m.logits),
                                          .experts = m.experts,
                                          .balance_slope = balanced ? slope : NULL};
    device->ops->router_backward(device, &args, m.shape);
    args.dlogits = cells(again);
    alone[d]->ops->router_backward(alone[d], &args, m.shape);
    check_same("dlogits", found, again, n);
    args.dlogits = cells(m.logits);
    device->ops->router_backward(device, &args, m.shape);
    assert_memory_equal(m.logits, found, n * sizeof *found);
    check_rounding("dlogits", device, found, expected, n);
    free(found);
    free(dweights);
    free(slope);
    moe_close(&m);
}

static void the_routers_gradient_goes_through_weights_and_balance(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++)
        for (int balanced = 0; balanced < 2; balanced++) {
            check_router_gradient(d, DEVICE_ROUTER_AS_IS, balanced);
            check_router_gradient(d, DEVICE_ROUTER_NORMALIZED, balanced);
        }
}

/* E sum_e (slots_e / N) (sum of p_e / N) over two layers, by logits, against differences. */
static double balance_loss(const float *const *logits, const double *counts)
{
    double sums[E] = {0}, loss = 0;
    for (int layer = 0; layer < 2; layer++)
        for (uint64_t row = 0; row < R; row++) {
            double total = 0;
            for (uint64_t e = 0; e < E; e++)
                total += exp((double)logits[layer][row * E + e]);
            for (uint64_t e = 0; e < E; e++)
                sums[e] += exp((double)logits[layer][row * E + e]) / total;
        }
    for (uint64_t e = 0; e < E; e++)
        loss += E * (counts[e] / (2 * R)) * (sums[e] / (2 * R));
    return loss;
}

static void the_load_balancing_loss_has_its_derivative(void **state)
{
    (void)state;
    struct device *device = devices[0];
    struct moe m[2];
    double balance[2 * E] = {0};
    float *dweights = floats(N), *found = floats((uint64_t)R * E), slope[E];
    for (int layer = 0; layer < 2; layer++) {
        m[layer] = moe_open(device, DEVICE_ROUTER_NORMALIZED, DEVICE_ROUTER_F32);
        double *own = m[layer].balance;
        m[layer].balance = balance;
        route(device, &m[layer]);
        m[layer].balance = own;
    }
    for (uint64_t e = 0; e < E; e++)
        slope[e] = (float)(E * balance[e] / pow(2 * R, 2));
    const float *logits[2] = {m[0].logits, m[1].logits};
    device->ops->router_backward(device,
                                 &(struct device_router_backward){.dlogits = cells(found),
                                                                  .dweights = dweights,
                                                                  .logits = cells(m[1].logits),
                                                                  .experts = m[1].experts,
                                                                  .balance_slope = slope},
                                 m[1].shape);
    for (uint64_t i = 0; i < (uint64_t)R * E; i += 7) {
        const float before = m[1].logits[i], step = 1.0f / 64;
        m[1].logits[i] = before + step;
        double above = balance_loss(logits, balance), high = (double)m[1].logits[i];
        m[1].logits[i] = before - step;
        double below = balance_loss(logits, balance), low = (double)m[1].logits[i];
        m[1].logits[i] = before;
        double expected = (above - below) / (high - low);
        assert_true(fabs((double)found[i] - expected) <= 1e-8 + 1e-3 * fabs(expected));
    }
    moe_close(&m[0]);
    moe_close(&m[1]);
    free(dweights);
    free(found);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_go_to_their_most_likely_experts),
        cmocka_unit_test(all_logits_equal_or_none_a_number_choose_the_first_experts),
        cmocka_unit_test(experts_gather_their_rows_and_scatter_what_they_make),
        cmocka_unit_test(the_routers_gradient_goes_through_weights_and_balance),
        cmocka_unit_test(the_load_balancing_loss_has_its_derivative),
    };
    return cmocka_run_group_tests(tests, devices_open, devices_close);
}
