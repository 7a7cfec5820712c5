/* What the instrument and its reader share (src/programs/instrument.rs). */

#define FRAMES 24
/* A page of anonymous memory, in `what` of a way; as PAGE_MAPPING_ANON of the kernel. */
#define ANONYMOUS 1ULL
/* GUP_PIN_COUNTING_BIAS */
#define PIN 1024
/* sizeof(struct page), and where a later page of several has its first one's address. */
#define PAGE_STRUCTURE 64
#define COMPOUND_HEAD 8

/* Partings of pinned pages of watched processes: in a told change; while a change that found no record has everything
 * under way; in none. */
enum { TOLD, CROWDED, UNTOLD, COUNTS };

/* How the kernel came to part a page. */
struct way {
	u64 what;
	u64 stack[FRAMES];
};

/* How often it came that way, and the first address and command. */
struct parting {
	u64 count, address;
	char command[16];
};

/* Where this kernel keeps what only the instrument reads. */
struct places {
	u64 vma_pgoff, mapping, index, references, pins;
	/* The halves of what anonymous pages are numbered from, where that is not vma_pgoff; or 0. */
	u64 anonymous_low, anonymous_high;
};
