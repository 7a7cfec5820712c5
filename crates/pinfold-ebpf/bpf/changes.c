/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The programs that tell processes which of their mappings change.
 *
 * One program runs at the beginning and one at the end of every function of the kernel that parts pages
 * from a range of addresses (src/programs/hooks.rs lists them). Each finds out which address
 * space it is - not the running task's: any process can truncate a file - and, if that is watched,
 * writes into its views.
 *
 * THE CLAIM. A change that has returned is in the log of each view that wishes for its range; and what
 * was registered with a device while it was under way is not taken for good.
 *
 * 1. The END alone suffices. A registration that holds pages which the change takes away looked
 *    them up in the page table before they went, so it began before this program runs. The entry that
 *    this program logs is therefore newer than the registration's beginning, and drops it. And the change's
 *    system call has not returned yet, nor can its addresses have been mapped anew: functions that
 *    unmap are called with the address space's lock held. Nothing is remembered from beginning to end for
 *    this, so nothing can be mismatched.
 * 2. The BEGINNING does more than that: registrations from before stop being used at once, and a
 *    record says what is under way, so that nothing registered now is kept. If a kernel skips the
 *    program at the end (see 4 and 5), what was registered before is dropped by the entry of the
 *    beginning, and what was registered meanwhile was never kept. So to lose a change, both must be skipped.
 *    A record whose end was skipped is recognised: it says how deep on its thread's kernel stack the function
 *    was called, and when the same thread calls one at that depth or above, the earlier call is over. Of some
 *    functions every call says that, however deep, because none of the others calls them (OUTERMOST). With the
 *    others it is a matter of chance: one route is deeper than another, and a kernel may begin each system call at
 *    another depth (randomize_kstack_offset). Without such a call the record is believed for RECORD_SECONDS.
 * 3. The filter. A process sets the bit of a block, then a full barrier, then looks for records, then
 *    has the pages looked up. The programs write the record, full barrier, look at the bit; and at the
 *    end: the pages are gone, full barrier, look at the bit. So a program that misses a bit set later is
 *    before the look-up of the pages, which then finds the new ones, or its record is seen.
 *    Records are therefore made whatever the filter says.
 * 4. When a kernel skips a program: a counter for each program and processor keeps it from running
 *    inside itself. If a task is preempted in the middle of it, then until it goes on no other task on that
 *    processor runs that program. Kernels that preempt only where they are asked to (none,
 *    voluntary) never do that here. One that preempts lazily does it to a task that has been
 *    in the kernel since the last tick but one, or in favour of a realtime task; then the two programs
 *    protect each other, and a change is lost only if two tasks wait, one preempted in each of its two programs,
 *    on the processors on which a third begins and ends a change (one, unless it migrates in between). Kernels that
 *    preempt fully are refused
 *    (when the programs are loaded: a user who enables full preemption later, by sched/preempt of debugfs, takes
 *    the risk). The kernel counts what it skips, but that does not mend it: a skipped program wakes no thread, so
 *    the count would have to be looked at for every hit, by a system call for each program; a thread that looks now
 *    and then finds a loss when what was stale has been used. And a view's descriptors do not lead there: a
 *    link tells its program's number, but to open a program by that takes CAP_SYS_ADMIN.
 *    Before the kernel changes how it preempts (sched_dynamic_update) every view is closed.
 * 5. When a kernel skips ends: a tool that attaches a program to one of these functions, or detaches one, or patches
 *    the function live, replaces its trampoline, and the tasks inside skip the programs at the end
 *    (bpf_tramp_image_put; 7.3 keeps the ends in the old one, but those of a program that is detached). The
 *    beginning has run in the old trampoline or runs in the new one. See 2.
 * 6. When a kernel skips everything: kernel.ftrace_enabled=0 takes the calls of all trampolines out of the
 *    kernel's functions. The program `setting` closes every view before: it runs under the lock (ftrace_lock)
 *    under which the setting takes effect, and a view is given out only after the setting was read, under the
 *    same lock, as not 0, once the programs know the view. So a write of 0 either is over then and is seen, or
 *    finds the view.
 */

#include "programs.h"

struct map watched SECTION("maps"); /* address space -> struct views */
struct map changes SECTION("maps"); /* number of a view -> struct changes */
struct map wishes SECTION("maps"); /* number of a view -> struct wishes */
struct map bells SECTION("maps"); /* number of a view -> ring buffer */

/* How many watched address spaces share each hash: an unwatched process pays for a look at this. */
u32 filter[1 << FILTER_BITS];
/* How often kernel.ftrace_enabled was read: by this the loader knows that `setting` stands where it should. */
u32 setting_reads;

const volatile struct offsets offsets = {};

char terms[] SECTION("license") = "Dual MIT/GPL";

static long (*const delete)(void *map, const void *key) = (void *)3;
static long (*const seq_write)(void *seq, const void *data, u32 size) = (void *)127;
static long (*const repeat)(u32 times, void *each, void *context, u64 flags) = (void *)181;
static long (*const ringbuf_output)(void *ring, void *data, u64 size, u64 flags) = (void *)130;
#define FORCE_WAKEUP 2

#define WRITE(word, value) (*(volatile typeof(word) *)&(word) = (value))
#define exchange __sync_lock_test_and_set
#define compare_exchange __sync_val_compare_and_swap

/* Every access before it is before every access after it: an atomic operation that gives the old value
 * is a full barrier. The old value is pretended to be used, or the compiler would not ask for it. */
INLINE void barrier_by(u64 *word)
{
	u64 old = __sync_fetch_and_add(word, 0);

	asm volatile("" : : "r"(old) : "memory");
}

/* How deep on its kernel stack the running thread is: smaller is deeper. Stacks are aligned to their size, and none
 * is larger than 64 KiB. The same at both ends of one call. */
INLINE u64 depth(u64 *argument)
{
	return half((u64)argument) & 0xffff;
}

/* Signed: a record may have been made since we read the clock, on another processor, and is then as young as
 * can be. */
INLINE int believed(struct record *r, u64 now)
{
	return (s64)(now - READ(r->since)) < (s64)(RECORD_SECONDS * 1000000000ULL);
}

/* Gives back what this thread's earlier calls left, whose ends were skipped: they were called at the depth of `caller` or
 * below it, so they are over. */
INLINE void forget_ended(struct changes *c, u64 caller)
{
#pragma clang loop unroll(disable)
	for (u32 try = 0; try < TRIES; try++) {
		struct record *r = record_of(c, (u32)caller, try);
		u64 owner = READ(r->owner), earlier;

		if (!owner || owner & WRITING)
			continue;
		earlier = unveiled(owner, offsets.veil);
		if ((u32)earlier == (u32)caller && earlier <= caller)
			compare_exchange(&r->owner, owner, 0);
	}
}

/* Notes that a change is under way. Ends with a full barrier. */
INLINE void enter(struct changes *c, u32 tid, u64 own, u64 start, u64 end)
{
	u64 now = monotonic_time();

#pragma clang loop unroll(disable)
	for (u32 try = 0; try < TRIES; try++) {
		struct record *r = record_of(c, tid, try);
		u64 owner = READ(r->owner);

		if (owner & WRITING || (owner && believed(r, now)))
			continue;
		if (compare_exchange(&r->owner, owner, own | WRITING) != owner)
			continue;
		/* It was given back and taken anew since we looked at its age. */
		if (owner && believed(r, now))
			exchange(&c->crowded, now);
		WRITE(r->start, start);
		WRITE(r->end, end);
		WRITE(r->since, now);
		exchange(&r->owner, own);
		return;
	}
	exchange(&c->crowded, now);
}

/* The caller's record of this change, if it has one. Ends with a full barrier. */
INLINE struct record *record_of_end(struct changes *c, u32 tid, u64 own, u64 start)
{
#pragma clang loop unroll(disable)
	for (u32 try = 0; try < TRIES; try++) {
		struct record *r = record_of(c, tid, try);

		if (READ(r->owner) == own && READ(r->start) == start) {
			barrier_by(&r->end);
			return r;
		}
	}
	barrier_by(&c->fence);
	return 0;
}

INLINE int wished(struct wishes *w, u64 start, u64 end)
{
	u64 block = start >> BLOCK_SHIFT, last = (end - 1) >> BLOCK_SHIFT;

	if (last - block >= BLOCKS_LOOKED_AT)
		return 1;
	for (u32 i = 0; i < BLOCKS_LOOKED_AT && block <= last; i++, block++)
		if (READ(w->blocks[(block >> 5) & (BLOCKS / 32 - 1)]) >> (block & 31) & 1)
			return 1;
	return 0;
}

/* An entry of the log. The sequence has changed when this returns; whether the entry can be read is
 * told by its stamp. */
INLINE void note(struct changes *c, u64 start, u64 end)
{
	u64 index = __sync_fetch_and_add(&c->sequence, 1) & ~CLOSED;
	struct entry *e = &c->entries[index & (ENTRIES - 1)];
	u64 stamp = READ(e->stamp);

	if (stamp & 1 || stamp >= DONE(index))
		return;
	if (compare_exchange(&e->stamp, stamp, BUSY(index)) != stamp)
		return;
	WRITE(e->start, start);
	WRITE(e->end, end);
	exchange(&e->stamp, DONE(index));
}

/* Wakes the sleeper. It says that it sleeps, full barrier, looks at the sequence; we have changed
 * the sequence by an atomic operation, and look whether it sleeps. */
INLINE void wake_sleeper(u32 view, struct wishes *w)
{
	u64 nothing = 0;
	void *bell;

	if (!exchange(&w->asleep, 0))
		return;
	bell = lookup(&bells, &view);
	if (bell)
		ringbuf_output(bell, &nothing, sizeof(nothing), FORCE_WAKEUP);
}

INLINE void wake(u32 view, struct wishes *w)
{
	if (READ(w->asleep))
		wake_sleeper(view, w);
}

INLINE void tell_view(u32 view, u64 start, u64 end, u64 call)
{
	u32 zero = 0;
	void *map = lookup(&changes, &view);
	struct changes *c = map ? lookup(map, &zero) : 0;
	struct wishes *w;
	struct record *r = 0;
	u32 tid = (u32)current_pid_tgid();
	u64 caller = CALLER(call, tid), own = veiled(caller, offsets.veil);

	map = lookup(&wishes, &view);
	w = map ? lookup(map, &zero) : 0;
	if (!c || !w || READ(c->sequence) & CLOSED)
		return;
	if (!ENDS(call)) {
		if (call & FIRST)
			forget_ended(c, call & OUTERMOST ? caller | ANY_DEPTH : caller);
		enter(c, tid, own, start, end);
	} else {
		r = record_of_end(c, tid, own, start);
	}
	if (wished(w, start, end)) {
		note(c, start, end);
		if (ENDS(call))
			wake(view, w);
	}
	if (r)
		compare_exchange(&r->owner, own, 0);
}

/* A function of its own, so that it is in the object once and not in each program. It returns something
 * because the verifier wants that of functions. */
static __attribute__((noinline)) int tell_views(u64 mm, u64 start, u64 end, u64 call)
{
	struct views *views = lookup(&watched, &mm);

	if (!views)
		return 0;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < VIEWS_PER_PROCESS; i++)
		if (READ(views->view[i]))
			tell_view(READ(views->view[i]) - 1, start, end, call);
	return 0;
}

INLINE void tell(u64 mm, u64 start, u64 end, u64 call)
{
	if (!READ(filter[hash(mm)]) || start >= end)
		return;
	tell_views(mm, start, end, call);
}

INLINE u64 lesser(u64 one, u64 other)
{
	return one < other ? one : other;
}

INLINE u64 greater(u64 one, u64 other)
{
	return one > other ? one : other;
}

INLINE u64 up_to_gigantic(u64 address)
{
	return (address + GIGANTIC - 1) & -GIGANTIC;
}

/* Whether a table of hugetlbfs entries that has some of these may be several processes': one of 1 GiB, all of it in
 * the mapping. As adjust_range_if_pmd_sharing_possible has it. */
INLINE int may_share_tables(u64 vma, u64 start, u64 end)
{
	u64 flags = field(vma, offsets.vma_flags), first, last;

	if (!(flags & VM_HUGETLB) || !(flags & VM_MAYSHARE))
		return 0;
	first = up_to_gigantic(field(vma, offsets.vma_start));
	last = field(vma, offsets.vma_end) & -GIGANTIC;
	return first < last && start < last && end > first;
}

/* Such a table is taken from a process whole, and nothing beside the mapping. The pages of its other entries stay in the
 * file, but a hole that is punched later may pass over a mapping that has no entries (docs/src/catalogue.md). */
INLINE void tell_mapping(u64 vma, u64 start, u64 end, u64 call)
{
	if (may_share_tables(vma, start, end)) {
		start = lesser(start, greater(start & -GIGANTIC, field(vma, offsets.vma_start)));
		end = greater(end, lesser(up_to_gigantic(end), field(vma, offsets.vma_end)));
	}
	tell(field(vma, offsets.vma_mm), start, end, call);
}

/* Where nothing but such tables goes. */
INLINE void unshare(u64 vma, u64 start, u64 end, u64 call)
{
	if (may_share_tables(vma, start, end))
		tell_mapping(vma, start, end, call);
}

/* PROGRAMS(shape) { ... }: the two programs for functions of this shape; `call` says which of them it is, and at
 * which depth. */
#define PROGRAMS(shape)                                                             \
	INLINE void shape(u64 *argument, u64 call);                                 \
	SECTION("begin/" #shape) int shape##_begin(u64 *argument)                   \
	{                                                                           \
		shape(argument, BEGINS_AT(depth(argument)));                        \
		return 0;                                                           \
	}                                                                           \
	SECTION("end/" #shape) int shape##_end(u64 *argument)                       \
	{                                                                           \
		shape(argument, ENDS_AT(depth(argument)));                          \
		return 0;                                                           \
	}                                                                           \
	INLINE void shape(u64 *argument, u64 call)

/* unmap_vmas(gather, ..., ..., start, end, ...), as in Linux 6.1 and 6.12 */
PROGRAMS(unmap_range)
{
	tell(field(argument[0], offsets.gather_mm), argument[3], argument[4], call | OUTERMOST);
}

/* unmap_vmas(gather, description), as in Linux 7.3 */
PROGRAMS(unmap_described)
{
	u64 what = argument[1];

	tell(field(argument[0], offsets.gather_mm), field(what, offsets.unmap_start),
	     field(what, offsets.unmap_end), call | OUTERMOST);
}

/* (mapping, address, length) */
PROGRAMS(zap)
{
	tell_mapping(argument[0], argument[1], argument[1] + argument[2], call);
}

/* (gather, mapping, address, length) */
PROGRAMS(zap_gathered)
{
	tell_mapping(argument[1], argument[2], argument[2] + argument[3], call);
}

/* (mapping, start, end) */
PROGRAMS(zap_between)
{
	tell_mapping(argument[0], argument[1], argument[2], call);
}

/* move_page_tables(mapping, from, new mapping, to, length), as in Linux 6.1 and 6.12 */
PROGRAMS(move)
{
	u64 vma = argument[0];

	tell_mapping(vma, argument[1], argument[1] + argument[4], call | OUTERMOST);
	tell(field(vma, offsets.vma_mm), argument[3], argument[3] + argument[4], call & ~FIRST);
}

/* move_page_tables(control), as in Linux 7.3: both addresses advance while it moves; the end of the old range is known once
 * it has begun, so that the beginnings can be had back. */
PROGRAMS(move_controlled)
{
	u64 control = argument[0];
	u64 vma = field(control, offsets.move_vma);
	u64 length = field(control, offsets.move_length);
	u64 from = field(control, offsets.move_old_address);
	u64 to = field(control, offsets.move_new_address);

	if (ENDS(call)) {
		u64 moved = from - (field(control, offsets.move_old_end) - length);

		from -= moved;
		to -= moved;
	}
	tell_mapping(vma, from, from + length, call | OUTERMOST);
	tell(field(vma, offsets.vma_mm), to, to + length, call & ~FIRST);
}

/* Whether a mapping has pages of a file (shared memory's are one's, too): a page of a file stays in the file when it
 * is parted from its addresses, though a device has pinned it, and can be replaced there later without
 * any call of these functions. An anonymous page that is pinned is parted from its address by none of the
 * functions below. */
INLINE int of_file(u64 vma)
{
	return field(vma, offsets.vma_ops) != 0;
}

/* (folio, mapping, address, ...), called for one folio in each mapping that has it */
PROGRAMS(unmap_folio)
{
	u64 vma = argument[1], address = argument[2], bytes = PAGE, start, end;

	if (!of_file(vma))
		return;
	if (field(vma, offsets.vma_flags) & VM_HUGETLB) {
		address &= -GIGANTIC;
		bytes = GIGANTIC;
	} else if (field(argument[0], 0) & offsets.head) {
		bytes = HUGE;
	}
	/* What lies beside the mapping has not changed. */
	start = greater(address, field(vma, offsets.vma_start));
	end = lesser(address + bytes, field(vma, offsets.vma_end));
	tell(field(vma, offsets.vma_mm), start, end, call);
}

/* (mapping, start, end, ...) */
PROGRAMS(unshare_between)
{
	unshare(argument[0], argument[1], argument[2], call);
}

/* (mapping, address), where a mapping is split */
PROGRAMS(unshare_at)
{
	unshare(argument[0], argument[1], argument[1] + 1, call);
}

/* (mapping) */
PROGRAMS(unshare_all)
{
	u64 vma = argument[0];

	unshare(vma, field(vma, offsets.vma_start), field(vma, offsets.vma_end), call);
}

/* (mapping, entry, address, ...), when a huge page's one entry is given up for many; a file's are left to faults */
PROGRAMS(split_huge)
{
	u64 vma = argument[0], address = argument[2] & -HUGE;

	if (of_file(vma))
		tell(field(vma, offsets.vma_mm), address, address + HUGE, call);
}

/* (address space, address, ...), when the entries of a file's huge page are given up for one, or for none */
PROGRAMS(collapse)
{
	u64 address = argument[1] & -HUGE;

	tell(argument[0], address, address + HUGE, call);
}

/* (..., address space, address), a breakpoint in a program's text */
PROGRAMS(poke)
{
	u64 address = argument[2] & -PAGE;

	tell(argument[1], address, address + PAGE, call);
}

/* (..., mapping, address) */
PROGRAMS(poke_mapping)
{
	u64 address = argument[2] & -PAGE;

	tell(field(argument[1], offsets.vma_mm), address, address + PAGE, call);
}

/* Nothing more will be told through this view, and its process is told that. */
INLINE void close_view(u32 view)
{
	u32 zero = 0;
	void *map = lookup(&changes, &view);
	struct changes *c = map ? lookup(map, &zero) : 0;
	struct wishes *w;
	u64 before;

	if (!c)
		return;
	/* With the value before, so that it is a full barrier; see wake_sleeper. */
	before = __sync_fetch_and_or(&c->sequence, CLOSED);
	asm volatile("" : : "r"(before) : "memory");
	map = lookup(&wishes, &view);
	w = map ? lookup(map, &zero) : 0;
	if (w)
		wake_sleeper(view, w);
}

/* exit_mmap(address space): no thread runs in it any more, and its address will be another's. */
SECTION("begin/gone") int gone(u64 *argument)
{
	u64 mm = argument[0];
	struct views *views;

	if (!READ(filter[hash(mm)]))
		return 0;
	views = lookup(&watched, &mm);
	if (!views)
		return 0;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < VIEWS_PER_PROCESS; i++)
		if (READ(views->view[i]))
			close_view(READ(views->view[i]) - 1);
	if (!delete(&watched, &mm))
		__sync_fetch_and_add(&filter[hash(mm)], -1);
	return 0;
}

static long close_one(u32 view, void *context)
{
	(void)context;
	close_view(view);
	return 0;
}

/* By a helper, because the verifier goes through a loop of our own once for each view. */
INLINE void close_every_view(void)
{
	repeat(MOST_VIEWS, close_one, 0, 0);
}

/* proc_dointvec(table, write, ...): see 6 above. */
SECTION("begin/setting") int setting(u64 *argument)
{
	u64 name[2] = {};

	/* With the zero byte at its end. */
	probe_read_kernel(name, 15, (void *)field(argument[0], offsets.setting_name));
	if (name[0] != FTRACE_E || name[1] != NABLED)
		return 0;
	if ((u32)argument[1])
		close_every_view();
	else
		__sync_fetch_and_add(&setting_reads, 1);
	return 0;
}

/* Before the kernel may begin to preempt where it did not, and after: a view may have been opened in between. */
SECTION("begin/preempting") int preempting_begin(u64 *argument)
{
	(void)argument;
	close_every_view();
	return 0;
}

SECTION("end/preempting") int preempting_end(u64 *argument)
{
	(void)argument;
	close_every_view();
	return 0;
}

/* Called by the loader, which cannot write what only programs may. */
SECTION("call/close") int close(u32 *argument)
{
	close_view(*argument);
	return 0;
}

/* Which address space each thread of a process is in. */
SECTION("iter/whose") int whose(u64 *argument)
{
	u64 task = argument[1];
	struct whose answer = {};

	if (!task)
		return 0;
	answer.mm = field(task, offsets.task_mm);
	if (offsets.preemption)
		probe_read_kernel(&answer.preemption, sizeof(u32), (void *)offsets.preemption);
	seq_write((void *)field(argument[0], offsets.meta_seq), &answer, sizeof(answer));
	return 0;
}
