/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The instrument that checks the list of functions at which the programs of changes.c stand (src/programs/hooks.rs).
 *
 * It stands where the list cannot: at the lowest functions that part a page from its address, which take it out of the
 * reverse mapping. Whatever clears an entry of a page table for good comes by there, for one page after the other, from
 * whichever function, known or not. For each pinned page of a watched address space it asks whether the running
 * thread's record says that a change of this address is under way. Where none does, it notes the way by which the
 * kernel came: an untold parting. It reads what changes.c writes and knows nothing of its functions.
 *
 * What it does not see, and which partings it may see that are none, stands in docs/src/catalogue.md.
 */

#include "programs.h"
#include "partings.h"

struct map watched SECTION("maps"); /* as in changes.c */
struct map changes SECTION("maps"); /* as in changes.c */
struct map partings SECTION("maps"); /* struct way -> struct parting */

u32 filter[1 << FILTER_BITS]; /* as in changes.c */
u32 counts[COUNTS];

const volatile struct offsets offsets = {};
const volatile struct places places = {};

char terms[] SECTION("license") = "Dual MIT/GPL";

static long (*const update)(void *map, const void *key, const void *value, u64 how) = (void *)2;
static long (*const current_command)(void *to, u32 size) = (void *)16;
static long (*const kernel_stack)(void *context, void *to, u32 size, u64 flags) = (void *)67;
#define NEW 1

INLINE u64 word_at(u64 address)
{
	u64 word = 0;

	probe_read_kernel(&word, sizeof(word), (void *)address);
	return word;
}

/* As folio_maybe_dma_pinned has it. */
INLINE int pinned(u64 folio)
{
	if (word_at(folio) & offsets.head)
		return (u32)word_at(folio + places.pins) > 0;
	return (u32)word_at(folio + places.references) >= PIN;
}

INLINE u64 first_index(u64 vma, u64 anonymous)
{
	if (!anonymous || !places.anonymous_low)
		return field(vma, places.vma_pgoff);
	return (u32)word_at(vma + places.anonymous_low) | word_at(vma + places.anonymous_high) << 32;
}

/* Where the mapping has that page of the folio. */
INLINE u64 address_of(u64 vma, u64 folio, u32 nth, u64 anonymous)
{
	u64 index = word_at(folio + places.index) + nth - first_index(vma, anonymous);

	return field(vma, offsets.vma_start) + index * PAGE;
}

/* Whether the running thread is in a change of all of this. */
INLINE int told(struct changes *c, u64 start, u64 end)
{
	u32 tid = (u32)current_pid_tgid();

#pragma clang loop unroll(disable)
	for (u32 try = 0; try < TRIES; try++) {
		struct record *r = record_of(c, tid, try);
		u64 owner = READ(r->owner);

		if (owner && (u32)unveiled(owner, offsets.veil) == tid && READ(r->start) <= start && end <= READ(r->end))
			return 1;
	}
	return 0;
}

/* Whether a change that found no record has everything under way. */
INLINE int crowded(struct changes *c)
{
	u64 at = READ(c->crowded);

	return at && (s64)(monotonic_time() - at) < (s64)(CROWDED_SECONDS * 1000000000ULL);
}

INLINE void count(u32 which)
{
	__sync_fetch_and_add(&counts[which], 1);
}

INLINE void report(u64 *argument, u64 what, u64 address)
{
	struct way way = {.what = what};
	struct parting first = {.count = 1, .address = address}, *known;

	count(UNTOLD);
	kernel_stack(argument, way.stack, sizeof(way.stack), 0);
	known = lookup(&partings, &way);
	if (known) {
		__sync_fetch_and_add(&known->count, 1);
		return;
	}
	current_command(first.command, sizeof(first.command));
	update(&partings, &way, &first, NEW);
}

INLINE void judge_in_view(u64 *argument, u32 view, u64 what, u64 start, u64 end)
{
	u32 zero = 0;
	void *map = lookup(&changes, &view);
	struct changes *c = map ? lookup(map, &zero) : 0;

	if (!c || READ(c->sequence) & CLOSED)
		return;
	if (told(c, start, end))
		count(TOLD);
	else if (crowded(c))
		count(CROWDED);
	else
		report(argument, what, start);
}

/* So many bytes from the `nth` page of the folio are taken from the mapping. */
INLINE void judge(u64 *argument, u64 folio, u32 nth, u64 vma, u64 bytes)
{
	u64 mm = field(vma, offsets.vma_mm), start, what;
	struct views *views;

	if (!READ(filter[hash(mm)]) || field(vma, offsets.vma_flags) & VM_HUGETLB || !pinned(folio))
		return;
	views = lookup(&watched, &mm);
	if (!views)
		return;
	what = word_at(folio + places.mapping) & ANONYMOUS;
	start = address_of(vma, folio, nth, what);
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < VIEWS_PER_PROCESS; i++)
		if (READ(views->view[i]))
			judge_in_view(argument, READ(views->view[i]) - 1, what, start, start + bytes);
}

INLINE u32 nth_page(u64 folio, u64 page)
{
	return (half(page) - half(folio)) / PAGE_STRUCTURE;
}

/* page_remove_rmap(page, mapping, whether it is a huge entry's), as in Linux 6.1 */
SECTION("begin/part_page") int part_page(u64 *argument)
{
	u64 page = argument[0], head = word_at(page + COMPOUND_HEAD);
	u64 bytes = argument[2] & 1 ? HUGE : PAGE;

	if (head & 1)
		judge(argument, head - 1, nth_page(head - 1, page), argument[1], bytes);
	else
		judge(argument, page, 0, argument[1], bytes);
	return 0;
}

/* folio_remove_rmap_ptes(folio, page, how many, mapping) */
SECTION("begin/part_pages") int part_pages(u64 *argument)
{
	u64 folio = argument[0];

	judge(argument, folio, nth_page(folio, argument[1]), argument[3], (u32)argument[2] * PAGE);
	return 0;
}

/* folio_remove_rmap_pmd(folio, page, mapping) */
SECTION("begin/part_huge") int part_huge(u64 *argument)
{
	u64 folio = argument[0];

	judge(argument, folio, nth_page(folio, argument[1]), argument[2], HUGE);
	return 0;
}
