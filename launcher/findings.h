/*
 * What opt_workers found out about the hardware (optimizer.recompute): blocks whose two
 * computations gave different bits. Each becomes a metrics event and a warning.
 */
#ifndef LAUNCHER_FINDINGS_H
#define LAUNCHER_FINDINGS_H

#include "launcher/launcher.h"

/* Tells what is new. Part of the launcher's loop. */
void findings_tell(struct launcher *l);

#endif
