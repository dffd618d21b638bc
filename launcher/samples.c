#include "launcher/samples.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launcher/metrics.h"
#include "launcher/progress.h"
#include "launcher/prompts.h"
#include "procs/check.h"
#include "procs/error.h"

enum { SHOWN_BYTES = 4096 }; /* of a sample; an event is one line of limited length */

struct samples {
    uint64_t step;
    struct generated *generated;
    char **texts;
    uint64_t *bytes;
    struct decoding *decoding;
    int failed;
};

static void cannot_decode(struct launcher *l, struct samples *s)
{
    s->failed = 1;
    progress_warn(l->progress, "samples of step %llu are not decoded: %s",
                  (unsigned long long)s->step, error_text());
    error_clear();
}

int samples_begin(struct launcher *l, uint64_t step)
{
    const struct prompts *prompts = l->sample_prompts;
    struct generated *generated;
    if (prompts_take_generated(l, prompts, &generated) < 0)
        return -(int)error_kind_now();
    struct samples *s = calloc(1, sizeof *s);
    CHECK(s != NULL);
    l->samples = s;
    s->step = step;
    s->generated = generated;
    s->texts = calloc(prompts->n, sizeof *s->texts);
    s->bytes = calloc(prompts->n, sizeof *s->bytes);
    CHECK(s->texts && s->bytes);
    if (prompts_decode_begin(&s->decoding, l, prompts, s->generated, s->texts, s->bytes) < 0)
        cannot_decode(l, s);
    return 0;
}

/* At the end of a character. NUL bytes, which only the byte tokenizer makes, end what is shown. */
static void cut(char *text)
{
    size_t n = strnlen(text, SHOWN_BYTES);
    if (n == SHOWN_BYTES)
        while (n > 0 && (text[n] & 0xc0) == 0x80)
            n--;
    text[n] = '\0';
}

static void tell(struct launcher *l, struct samples *s, uint64_t p)
{
    char quoted[2 * SHOWN_BYTES], fields[sizeof quoted + 256];
    cut(s->texts[p]);
    if (!s->failed)
        progress_say(l->progress, "sample: %s|%s", l->config.eval_sample_prompts.items[p],
                     s->texts[p]);
    (void)snprintf(fields, sizeof fields, ", \"step\": %llu, \"prompt\": %llu, \"text\": %s",
                   (unsigned long long)s->step, (unsigned long long)p,
                   s->failed ? "null" : metrics_quote(quoted, sizeof quoted, s->texts[p]));
    metrics_event(l->metrics, "sample", fields);
}

int samples_turn(struct launcher *l)
{
    struct samples *s = l->samples;
    int rc = s->decoding ? prompts_decode_turn(&s->decoding) : 0;
    if (rc > 0)
        return 1;
    if (rc < 0)
        cannot_decode(l, s);
    for (uint64_t p = 0; p < s->generated->prompts; p++)
        tell(l, s, p);
    samples_drop(l);
    return 0;
}

void samples_drop(struct launcher *l)
{
    struct samples *s = l->samples;
    if (!s)
        return;
    prompts_decode_drop(&s->decoding);
    for (uint64_t p = 0; p < s->generated->prompts; p++)
        free(s->texts[p]);
    free(s->texts);
    free(s->bytes);
    free(s->generated);
    free(s);
    l->samples = NULL;
}
