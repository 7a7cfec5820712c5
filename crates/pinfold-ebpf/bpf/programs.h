/* What both objects' programs are written with. */

#include "changes.h"

#define SECTION(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))

/* Names only: the loader makes the maps. */
struct map {
	u32 unused;
};

static void *(*const lookup)(void *map, const void *key) = (void *)1;
static u64 (*const monotonic_time)(void) = (void *)5;
static u64 (*const current_pid_tgid)(void) = (void *)14;
static long (*const probe_read_kernel)(void *to, u32 size, const void *from) = (void *)113;

#define READ(word) (*(volatile typeof(word) *)&(word))

INLINE u64 field(u64 base, u64 offset)
{
	return *(u64 *)(base + offset);
}

/* The lower half of a pointer. The verifier knows pointers, and refuses to calculate with them; half of one is a
 * number to it. */
INLINE u32 half(u64 pointer)
{
	u32 low;

	asm volatile("%0 = %1" : "=w"(low) : "w"((u32)pointer));
	return low;
}

INLINE u32 hash(u64 mm)
{
	return (half(mm) * 0x9e3779b1U) >> (32 - FILTER_BITS);
}

INLINE struct record *record_of(struct changes *c, u64 tid, u32 try)
{
	return &c->records[(tid + try * 37) & (RECORDS - 1)];
}
