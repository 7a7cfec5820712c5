/* What programs that try the library have in common: a domain, memory that is registered often, lines of output,
 * and what the process had at its end. */

#ifndef CASES_H
#define CASES_H

#include "loop.h"
#include <dirent.h>

enum { BYTES = 64 << 10 };

#define LOCAL IBV_ACCESS_LOCAL_WRITE
#define REMOTE (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)

#define SAY(...) (printf(__VA_ARGS__), putchar('\n'), fflush(stdout))

static struct ibv_pd *pd;

static inline struct ibv_context *begin(void)
{
	struct ibv_context *context = open_device();

	CHECK((pd = ibv_alloc_pd(context)));
	return context;
}

static inline void end(struct ibv_context *context)
{
	SAY("dealloc_pd %d", ibv_dealloc_pd(pd));
	SAY("close %d", ibv_close_device(context));
}

/* Registers the same bytes so often that a preload library that keeps registrations keeps this one. */
static inline void registered_often(struct ibv_pd *domain, char *memory, size_t bytes)
{
	int i;

	for (i = 0; i < 4; i++) {
		struct ibv_mr *mr = ibv_reg_mr(domain, memory, bytes, LOCAL);

		CHECK(mr && !ibv_dereg_mr(mr));
	}
}

static inline long status_of(const char *key)
{
	char line[256];
	long number = -1;
	FILE *file = fopen("/proc/self/status", "r");

	CHECK(file);
	while (fgets(line, sizeof(line), file))
		if (!strncmp(line, key, strlen(key)))
			number = atol(line + strlen(key));
	fclose(file);
	return number;
}

static inline int open_descriptors(void)
{
	DIR *directory = opendir("/proc/self/fd");
	int descriptors = -1; /* not the directory's own */

	CHECK(directory);
	for (struct dirent *entry; (entry = readdir(directory));)
		descriptors += entry->d_name[0] != '.';
	closedir(directory);
	return descriptors;
}

/* Waits until no more than this is pinned: a preload library may end registrations of memory that has gone a moment
 * later. */
static inline void await_pinned_kib(long most)
{
	int look;

	for (look = 0; look < 2000 && status_of("VmPin:") > most; look++)
		usleep(5000);
	CHECK(status_of("VmPin:") <= most);
}

/* The names of the process's threads, each with its state, on standard error. */
static inline void name_threads(void)
{
	DIR *directory = opendir("/proc/self/task");
	char path[64], line[128];

	CHECK(directory);
	for (struct dirent *entry; (entry = readdir(directory));) {
		FILE *file;

		snprintf(path, sizeof(path), "/proc/self/task/%.20s/stat", entry->d_name);
		if (entry->d_name[0] == '.' || !(file = fopen(path, "r")))
			continue;
		if (fgets(line, sizeof(line), file))
			fprintf(stderr, "thread %.40s\n", line);
		fclose(file);
	}
	closedir(directory);
}

/* What the process has now, for the script that compares two of them. Two things are there for a moment only, and
 * not counted, as the least of some looks has them not: a thread that was joined and has not left the kernel (a join
 * returns before that), and a descriptor of this function's own. */
static inline void report_use(double start_us)
{
	double us = now_us() - start_us;
	int descriptors = open_descriptors(), look, now;
	long threads = status_of("Threads:");

	for (look = 0; look < 20 && threads > 1; look++) {
		usleep(3000);
		if ((now = open_descriptors()) < descriptors)
			descriptors = now;
		if ((now = status_of("Threads:")) < threads)
			threads = now;
	}
	if (threads > 1)
		name_threads();
	fprintf(stderr, "used: threads %ld descriptors %d addresses %ld memory %ld us %.0f\n", threads, descriptors,
		status_of("VmSize:"), status_of("VmHWM:"), us);
}

struct a_case {
	const char *name;
	void (*run)(void);
};

/* Runs the case that the first argument names. */
static inline int run_case(const struct a_case *cases, size_t count, int argc, char **argv)
{
	double start = now_us();
	size_t i;

	for (i = 0; argc > 1 && i < count; i++)
		if (!strcmp(argv[1], cases[i].name)) {
			cases[i].run();
			report_use(start);
			return 0;
		}
	fprintf(stderr, "%s: no such case\n", argv[0]);
	return 2;
}

#endif
