/*
 * A program without libibverbs that loads one.
 *
 *   host LIBRARY [STOCK [TIMES]]
 *
 * LIBRARY has one, or is one; of that it takes the functions by its handle, as NCCL does. Or it is a libfabric. With STOCK no
 * addresses are left but as many as the C library's allocator has then. With `restricted` it forbids itself what it does not do.
 * A library that has one registers so many times. With `global` it has the library for all of itself.
 */

#include "../check.h"

#include "filter.h"
#include "verbs.h"
#include <dlfcn.h>
#include <malloc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define TAKE(name) __typeof__(&ibv_##name) name = (__typeof__(&ibv_##name))dlsym(handle, "ibv_" #name)

static struct ibv_pd *opens_by_handle(void *handle)
{
	TAKE(open_device);
	TAKE(alloc_pd);

	return alloc_pd(open_device(NULL));
}

static int registers_by_handle(void *handle, struct ibv_pd *pd)
{
	TAKE(reg_mr);
	TAKE(dereg_mr);
	char *memory = aligned_alloc(4096, 64 << 10);
	int failures = 0;

	for (int i = 0; i < 4; i++) {
		struct ibv_mr *mr = reg_mr(pd, memory, 64 << 10, 1);

		failures += !mr || mr->addr != memory || dereg_mr(mr);
	}
	return failures;
}

static void leave_no_addresses(size_t stock)
{
	struct rlimit few = { 0, RLIM_INFINITY };

	/* What is freed stays the allocator's. */
	CHECK(mallopt(M_TRIM_THRESHOLD, 1 << 30) && mallopt(M_MMAP_THRESHOLD, 1 << 25));
	if (stock)
		free(malloc(stock));
	CHECK(!setrlimit(RLIMIT_AS, &few));
	for (size_t bytes = 1 << 20; !stock && bytes >= 16; bytes /= 2)
		while (malloc(bytes))
			;
}

static void restrict_itself(void)
{
	static struct sock_filter rules[] = {
		NUMBER,
		ON(SYS_mmap, SECCOMP_RET_KILL_PROCESS),
		ON(SYS_munmap, SECCOMP_RET_KILL_PROCESS),
		ON(SYS_rt_sigprocmask, SECCOMP_RET_KILL_PROCESS),
		ON(SYS_openat, SECCOMP_RET_KILL_PROCESS),
		OTHERWISE(SECCOMP_RET_ALLOW),
	};

	CHECK(mallopt(M_TRIM_THRESHOLD, 1 << 30) && mallopt(M_MMAP_THRESHOLD, 1 << 25));
	free(malloc(1 << 20));
	filter(rules, LENGTH(rules), 1);
}

/* By the name that a program finds. */
static int opens_a_fabric(void *libfabric)
{
	void *found = dlsym(RTLD_DEFAULT, "fi_fabric"), *fabric = NULL;
	int (*open)(void *, void **, void *);

	open = (__typeof__(open))(found ? found : dlsym(libfabric, "fi_fabric"));
	return open(NULL, &fabric, libfabric) || fabric != libfabric;
}

int main(int count, char **given)
{
	bool is_global = count > 2 && !strcmp(given[2], "global"), is_short = count > 2 && !is_global;
	void *handle = count > 1 ? dlopen(given[1], RTLD_NOW | (is_global ? RTLD_GLOBAL : RTLD_LOCAL)) : NULL;
	int (*registers)(int), failures;
	void (*opens)(void);
	struct ibv_pd *pd = NULL;

	if (!handle) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	registers = (int (*)(int))dlsym(handle, "registers_by_itself");
	opens = (void (*)(void))dlsym(handle, "opens_by_itself");
	if (opens)
		opens();
	else if (!registers && !dlsym(handle, "fi_fabric"))
		pd = opens_by_handle(handle);
	if (is_short && !strcmp(given[2], "restricted"))
		restrict_itself();
	else if (is_short)
		leave_no_addresses(atol(given[2]));
	if (registers)
		failures = registers(count > 3 ? atoi(given[3]) : 4);
	else
		failures = pd ? registers_by_handle(handle, pd) : opens_a_fabric(handle);
	printf("%d failures\n", failures);
	if (is_short)
		exit(fflush(stdout));
	printf("%s\n", dlclose(handle) || dlopen(given[1], RTLD_NOW | RTLD_NOLOAD) ? "stays" : "unloaded");
	return 0;
}
