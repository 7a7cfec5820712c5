/*
 * A stand-in for libfabric: its interface for an imported memory monitor, and a cache of registrations that takes the
 * steps of libfabric's (`prov/util/src/util_mr_cache.c`) in their order and under the same locks. A registration is a
 * note of when it was made.
 */

#ifndef FABRIC_H
#define FABRIC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fid;

struct fi_ops {
	size_t size;
	int (*close)(struct fid *fid);
	int (*bind)(struct fid *fid, struct fid *other, uint64_t flags);
};

struct fid {
	size_t fclass;
	void *context;
	struct fi_ops *ops;
};

struct fid_mem_monitor;

struct fi_ops_mem_monitor {
	size_t size;
	int (*start)(struct fid_mem_monitor *monitor);
	void (*stop)(struct fid_mem_monitor *monitor);
	int (*subscribe)(struct fid_mem_monitor *monitor, const void *addr, size_t len);
	void (*unsubscribe)(struct fid_mem_monitor *monitor, const void *addr, size_t len);
	bool (*valid)(struct fid_mem_monitor *monitor, const void *addr, size_t len);
};

struct fi_ops_mem_notify {
	size_t size;
	void (*notify)(struct fid_mem_monitor *monitor, const void *addr, size_t len);
};

struct fid_mem_monitor {
	struct fid fid;
	struct fi_ops_mem_monitor *export_ops;
	struct fi_ops_mem_notify *import_ops;
};

enum { FI_CLASS_MR_CACHE = 22, FI_CLASS_MEM_MONITOR = 23 };

int fi_fabric(void *attributes, void **fabric, void *context);
int fi_open(uint32_t version, const char *name, void *attributes, size_t bytes, uint64_t flags, struct fid **fid,
	    void *context);

struct cache;

/* NULL where the monitor does not start. */
struct cache *cache_open(void);
void cache_close(struct cache *cache);
/* Registers, or finds what is registered; `made` is what `now` was before the registration. `between` is called between
 * a registration and its subscription. The entry goes back at once. Whether it was found. */
bool cache_use(struct cache *cache, const void *addr, size_t len, void (*between)(void), unsigned long *made);
/* How many entries there are. */
size_t cache_entries(struct cache *cache);
/* Counts up. */
unsigned long now(void);

#endif
