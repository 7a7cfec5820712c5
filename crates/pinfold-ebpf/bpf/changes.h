/* What the programs and a watched process share; the same as src/layout.rs, where it is explained. */

typedef unsigned long long u64;
typedef long long s64;
typedef unsigned int u32;

#define ENTRIES 4096
#define RECORDS 128
#define TRIES 4
#define RECORD_SECONDS 60
#define CROWDED_SECONDS 2
#define BLOCK_SHIFT 21
#define BLOCKS 65536
#define BLOCKS_LOOKED_AT 8
#define WRITING (1ULL << 63)
#define CLOSED (1ULL << 63)
#define DONE(index) (2 * ((index) + 1))
#define BUSY(index) (DONE(index) + 1)

/* Who makes a change: a thread, at a depth of its kernel stack. */
#define CALLER(call, tid) (((call) & 0xffff) << 32 | (tid))
#define ANY_DEPTH (0xffffULL << 32)
/* In a record that stands as its owner, veiled (programs.h): two halves, and a bit so that none is 0. */
#define HALF_BITS 31
#define HALF ((1ULL << HALF_BITS) - 1)
#define VEILED (1ULL << 62)
#define VEIL_WORDS 8

struct record {
	u64 owner, start, end, since;
};

struct entry {
	u64 stamp, start, end;
};

struct changes {
	u64 sequence, crowded, fence, reserved[5];
	struct record records[RECORDS];
	struct entry entries[ENTRIES];
};

struct wishes {
	u64 asleep, reserved[7];
	u32 blocks[BLOCKS / 32];
};

/* --- what the programs and their loader share (src/programs/object.rs) --- */

#define MOST_VIEWS 1024
#define VIEWS_PER_PROCESS 2
#define FILTER_BITS 12

/* Which end of a call: its depth on the stack, and bits. FIRST: of what a call begins this is the first, and none of the
 * thread's records of this depth is one of its own. OUTERMOST: the function is called by no other that has programs,
 * so none of the thread's records is of a call that goes on. */
#define FIRST (1ULL << 16)
#define OUTERMOST (1ULL << 18)
#define BEGINS_AT(depth) ((depth) | FIRST)
#define ENDS_AT(depth) ((depth) | 1ULL << 17)
#define ENDS(call) ((call) & 1ULL << 17)

#define PAGE 4096ULL
#define HUGE (2ULL << 20)
#define GIGANTIC (1ULL << 30)
#define VM_HUGETLB 0x400000ULL
#define VM_MAYSHARE 0x80ULL
/* "ftrace_enabled" as two words. */
#define FTRACE_E 0x655f656361727466ULL
#define NABLED 0x000064656c62616eULL

/* The value of `watched`: which views an address space has, each number plus one. */
struct views {
	u32 view[VIEWS_PER_PROCESS];
};

/* Where this kernel keeps what we read; written by the loader before the programs are verified, so
 * to the verifier these are constants. */
struct offsets {
	u64 gather_mm, vma_mm, task_mm, meta_seq;
	u64 unmap_start, unmap_end;
	u64 move_vma, move_old_address, move_old_end, move_new_address, move_length;
	u64 vma_ops, vma_flags, setting_name;
	u64 vma_start, vma_end;
	/* The bit of a folio's first word that says that it has several pages. */
	u64 head;
	u64 preemption;
	/* What owners are veiled by: random, and known to the programs and their loader alone. */
	u64 veil[VEIL_WORDS];
};

/* What the program `whose` writes for each thread of a process. */
struct whose {
	u64 mm;
	u64 preemption;
};
