/*
 * A program of libfabric's that changes its memory by routes that no hook sees, and says whether an entry of the cache
 * was used that was registered before the last change, and whether any was used. With an argument it also waits until
 * the cache is told of a change.
 */

#include "../check.h"
#include "fabric.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 64 << 10, ROUNDS = 40, THREADS = 2 };

static unsigned long stale, hits;

static char *map(void)
{
	char *mapped = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(mapped != MAP_FAILED);
	mapped[0] = 1;
	return mapped;
}

/* Past the C library's functions. */
static void change(char *memory, int route)
{
	if (route % 2)
		CHECK(!syscall(SYS_madvise, memory, BYTES, MADV_DONTNEED));
	else
		CHECK((char *)syscall(SYS_mmap, memory, BYTES, PROT_READ | PROT_WRITE,
				      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
	memory[0] = 1;
}

/* Uses it, and counts. */
static void use(struct cache *cache, const char *memory, unsigned long changed, void (*between)(void))
{
	unsigned long made;
	bool is_hit = cache_use(cache, memory, BYTES, between, &made);

	__atomic_add_fetch(&hits, is_hit, __ATOMIC_RELAXED);
	__atomic_add_fetch(&stale, is_hit && made < changed, __ATOMIC_RELAXED);
}

static struct cache *opened[2];

static void *changes_between_uses(void *unused)
{
	char *memory = map();
	unsigned long changed = 0;

	for (int round = 0; round < ROUNDS; round++) {
		for (int i = 0; i < 8; i++)
			use(opened[i % 2], memory, changed, NULL);
		change(memory, round);
		changed = now();
	}
	return unused;
}

static char *between_memory;
static unsigned long between_changed;
static int between_route;

static void changes_between(void)
{
	change(between_memory, between_route++);
	between_changed = now();
}

/* A change behind the registration and before the cache subscribes. */
static void changes_in_the_gap(void)
{
	between_memory = map();
	for (int round = 0; round < ROUNDS; round++) {
		for (int i = 0; i < 3; i++) {
			use(opened[0], between_memory, between_changed, changes_between);
			use(opened[0], between_memory, between_changed, NULL);
		}
	}
}

/* Both caches have it, and the second is asked alone behind the change. */
static void two_caches(void)
{
	for (int round = 0; round < ROUNDS; round++) {
		char *memory = map();
		unsigned long changed;

		for (int i = 0; i < 8; i++)
			use(opened[i % 2], memory, 0, NULL);
		change(memory, round);
		changed = now();
		for (int i = 0; i < 4; i++)
			use(opened[1], memory, changed, NULL);
		for (int i = 0; i < 4; i++)
			use(opened[0], memory, changed, NULL);
	}
}

/* A child has its parent's cache, and nothing in it is believed. */
static void forks(void)
{
	char *memory = map();
	int status;
	pid_t child;

	for (int i = 0; i < 4; i++)
		use(opened[0], memory, 0, NULL);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		hits = 0;
		for (int i = 0; i < 4; i++)
			use(opened[0], memory, 0, NULL);
		_exit(hits != 0);
	}
	CHECK(waitpid(child, &status, 0) == child);
	printf("child: %s\n", status ? "hits" : "no hits");
}

/* What has changed is dropped without being asked for. */
static void is_told(void)
{
	char *memory = map();
	size_t before;

	for (int i = 0; i < 4; i++)
		use(opened[0], memory, 0, NULL);
	before = cache_entries(opened[0]);
	change(memory, 1);
	while (cache_entries(opened[0]) >= before)
		usleep(1000);
	puts("dropped");
}

int main(int count, char **given)
{
	void *fabric = NULL;
	pthread_t threads[THREADS];

	CHECK(!fi_fabric(NULL, &fabric, given));
	CHECK(fabric == given);
	opened[0] = cache_open();
	if (!opened[0]) {
		puts("no cache");
		return 0;
	}
	opened[1] = cache_open();
	CHECK(opened[1]);
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, changes_between_uses, NULL));
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	two_caches();
	changes_in_the_gap();
	printf("%s stale, %s\n", stale ? "some" : "none", hits ? "hits" : "no hits");
	forks();
	if (count > 1)
		is_told();
	cache_close(opened[0]);
	cache_close(opened[1]);
	return 0;
}
