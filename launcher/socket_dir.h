/*
 * The directory in /tmp that holds a launcher's socket, /tmp/mtlaunch-XXXXXX/ctl, and what a killed
 * launcher leaves of it.
 */
#ifndef LAUNCHER_SOCKET_DIR_H
#define LAUNCHER_SOCKET_DIR_H

/* Removes a leftover: nothing happens unless it is a directory of this user, no link, in which
 * nobody listens. Younger than `age_s` seconds it stays: its launcher may be about to listen. */
void socket_dir_remove_dead(const char *directory, int age_s);

/* Can somebody who comes now still find this socket? Cleaners of /tmp take the name away, not the
 * connections that are. */
int socket_dir_is_there(const char *endpoint);

/* What socket_dir_remove_dead() does, for everything in /tmp that has such a name and is old. */
void socket_dir_sweep(void);

#endif
