#include "fabric.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64 };

struct entry {
	const char *start;
	size_t length;
	unsigned long made;
};

struct cache {
	struct cache *next;
	struct entry entries[MOST];
	size_t count;
};

static pthread_mutex_t mm_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t mm_state_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_rwlock_t mm_list_rwlock = PTHREAD_RWLOCK_INITIALIZER;
static struct cache *caches;
static struct fid_mem_monitor *imported;

unsigned long now(void)
{
	static unsigned long count;

	return __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
}

/* With `mm_lock`. */
static void drop(struct cache *cache, const char *start, size_t length)
{
	for (size_t i = 0; i < cache->count;) {
		struct entry *entry = &cache->entries[i];

		if (entry->start < start + length && start < entry->start + entry->length) {
			struct entry dropped = *entry;

			*entry = cache->entries[--cache->count];
			if (imported)
				imported->export_ops->unsubscribe(imported, dropped.start, dropped.length);
		} else {
			i++;
		}
	}
}

static void notify(struct fid_mem_monitor *monitor, const void *addr, size_t len)
{
	(void)monitor;
	pthread_rwlock_rdlock(&mm_list_rwlock);
	pthread_mutex_lock(&mm_lock);
	for (struct cache *cache = caches; cache; cache = cache->next)
		drop(cache, addr, len);
	pthread_mutex_unlock(&mm_lock);
	pthread_rwlock_unlock(&mm_list_rwlock);
}

static struct fi_ops_mem_notify notifying = { sizeof(notifying), notify };

static int bind_monitor(struct fid *fid, struct fid *other, uint64_t flags)
{
	struct fid_mem_monitor *monitor = (struct fid_mem_monitor *)other;

	(void)fid;
	if (flags || other->fclass != FI_CLASS_MEM_MONITOR)
		return -EINVAL;
	if (imported || caches)
		return -EBUSY;
	if (monitor->export_ops->size < sizeof(*monitor->export_ops))
		return -EINVAL;
	imported = monitor;
	monitor->import_ops = &notifying;
	return 0;
}

static int close_fid(struct fid *fid)
{
	free(fid);
	return 0;
}

static struct fi_ops cache_ops = { sizeof(cache_ops), close_fid, bind_monitor };

int fi_open(uint32_t version, const char *name, void *attributes, size_t bytes, uint64_t flags, struct fid **fid,
	    void *context)
{
	if (strcmp(name, "mr_cache") || version < (1 << 16 | 13) || attributes || bytes || flags)
		return -ENOSYS;
	*fid = calloc(1, sizeof(**fid));
	(*fid)->fclass = FI_CLASS_MR_CACHE;
	(*fid)->context = context;
	(*fid)->ops = &cache_ops;
	return 0;
}

int fi_fabric(void *attributes, void **fabric, void *context)
{
	(void)attributes;
	*fabric = context;
	return 0;
}

struct cache *cache_open(void)
{
	struct cache *cache = calloc(1, sizeof(*cache));
	bool is_first;

	pthread_rwlock_wrlock(&mm_list_rwlock);
	is_first = !caches;
	cache->next = caches;
	caches = cache;
	pthread_rwlock_unlock(&mm_list_rwlock);
	pthread_mutex_lock(&mm_state_lock);
	if (is_first && imported && imported->export_ops->start(imported)) {
		pthread_mutex_unlock(&mm_state_lock);
		caches = NULL;
		free(cache);
		return NULL;
	}
	pthread_mutex_unlock(&mm_state_lock);
	return cache;
}

void cache_close(struct cache *cache)
{
	struct cache **place = &caches;
	bool is_last;

	pthread_rwlock_wrlock(&mm_list_rwlock);
	pthread_mutex_lock(&mm_lock);
	while (*place != cache)
		place = &(*place)->next;
	*place = cache->next;
	drop(cache, NULL, SIZE_MAX / 2);
	is_last = !caches;
	pthread_mutex_unlock(&mm_lock);
	pthread_rwlock_unlock(&mm_list_rwlock);
	free(cache);
	pthread_mutex_lock(&mm_state_lock);
	if (is_last && imported)
		imported->export_ops->stop(imported);
	pthread_mutex_unlock(&mm_state_lock);
}

size_t cache_entries(struct cache *cache)
{
	size_t count;

	pthread_mutex_lock(&mm_lock);
	count = cache->count;
	pthread_mutex_unlock(&mm_lock);
	return count;
}

bool cache_use(struct cache *cache, const void *addr, size_t len, void (*between)(void), unsigned long *made)
{
	struct entry fresh = { addr, len, 0 };

	pthread_mutex_lock(&mm_lock);
	for (size_t i = 0; i < cache->count; i++) {
		struct entry *entry = &cache->entries[i];
		const char *start = addr;

		if (entry->start <= start && start + len <= entry->start + entry->length &&
		    (!imported || imported->export_ops->valid(imported, entry->start, entry->length))) {
			*made = entry->made;
			pthread_mutex_unlock(&mm_lock);
			return true;
		}
	}
	drop(cache, addr, len);
	pthread_mutex_unlock(&mm_lock);

	/* No lock is held as a provider registers. */
	*made = fresh.made = now();
	if (between)
		between();

	pthread_mutex_lock(&mm_lock);
	if (cache->count < MOST) {
		cache->entries[cache->count++] = fresh;
		if (imported && imported->export_ops->subscribe(imported, addr, len)) {
			cache->count--;
			imported->export_ops->unsubscribe(imported, addr, len);
		}
	}
	pthread_mutex_unlock(&mm_lock);
	return false;
}
