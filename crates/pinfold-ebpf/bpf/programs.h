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

/* Multiply-shift hashing: secret numbers make any two values differ as often as by chance. */
INLINE u64 scrambled(u64 half, u64 factor, u64 addend)
{
	return (factor * half + addend) >> (64 - HALF_BITS);
}

/* The owner that stands for a caller in a view, whose holder is not to learn how a kernel stack lies, nor the number of a
 * thread where it does not see it. A Feistel network: each step is undone by itself, whatever it scrambles by. So there is
 * one owner for each caller, and comparing owners for equality is comparing callers. */
INLINE u64 veiled(u64 caller, const volatile u64 *veil)
{
	u64 left = caller >> 32, right = caller & HALF;

	left ^= scrambled(right, veil[0], veil[1]);
	right ^= scrambled(left, veil[2], veil[3]);
	left ^= scrambled(right, veil[4], veil[5]);
	right ^= scrambled(left, veil[6], veil[7]);
	return VEILED | left << HALF_BITS | right;
}

/* The caller that an owner stands for, whether its record is being written or not. */
INLINE u64 unveiled(u64 owner, const volatile u64 *veil)
{
	u64 left = owner >> HALF_BITS & HALF, right = owner & HALF;

	right ^= scrambled(left, veil[6], veil[7]);
	left ^= scrambled(right, veil[4], veil[5]);
	right ^= scrambled(left, veil[2], veil[3]);
	left ^= scrambled(right, veil[0], veil[1]);
	return left << 32 | right;
}

INLINE struct record *record_of(struct changes *c, u64 tid, u32 try)
{
	return &c->records[(tid + try * 37) & (RECORDS - 1)];
}
