//! A region on another memory node.

use super::{RearrangeError, accessible_parts, check};
use pinfold_core::{Monitor, Suspend, Suspended};
use pinfold_kernel::{Errno, numa, process::page_bytes};
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// A memory node, by the kernel's number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Node(pub u32);

/// How many pages of a region are where.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct OnNodes {
    /// Pages, of the smallest size, by node.
    pub pages: BTreeMap<Node, usize>,
    /// Pages that are not in memory, have no owner (the page of zeros), or may neither be read nor written.
    pub absent: usize,
}

/// What became of a region that was to move.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Migrated {
    /// Where its pages were.
    pub before: OnNodes,
    /// Where they are.
    pub after: OnNodes,
    /// The nodes of this machine that have memory. With a single one there is nowhere to go, and
    /// nothing is moved.
    pub nodes: Vec<Node>,
    /// Pages that are in memory and not on the node that was asked for, with the kernel's error
    /// number for each: `EBUSY` if it is pinned elsewhere or in use just now, `ENOMEM` if the
    /// node is full.
    pub left: Vec<(usize, i32)>,
    /// How long it took, looking included.
    pub elapsed: Duration,
}

/// Moves the pages of a suspended region to `node`, as far as it goes. The program may read and
/// write them meanwhile.
///
/// Pages that stay are told ([`Migrated::left`]): that is no error. Where pages go that are made
/// later is not changed: that is the memory policy's to say.
///
/// # Errors
///
/// [`RearrangeError`], most of all [`NoSuchNode`](RearrangeError::NoSuchNode): then nothing was moved. Where the suspension
/// has ended meanwhile, or the kernel refuses to go on, what was moved until then stays.
pub fn migrate<R: Suspend, M: Monitor>(
    suspended: &Suspended<'_, R, M>,
    node: Node,
) -> Result<Migrated, RearrangeError> {
    check(suspended)?;
    let begun = Instant::now();
    let nodes = nodes()?;
    let number = i32::try_from(node.0).ok().filter(|_| nodes.contains(&node));
    let Some(number) = number else { return Err(RearrangeError::NoSuchNode { node, nodes }) };
    let range = suspended.range().page_aligned(page_bytes());
    let (mut before, mut after) = (OnNodes::default(), OnNodes::default());
    (before.absent, after.absent) = (range.len() / page_bytes(), range.len() / page_bytes());
    let mut left = Vec::new();
    // A range may be far longer than what there is of it, and have more pages than there is memory for a list.
    for batch in accessible_parts(range)?.iter().flat_map(|part| part.pieces(BATCH)) {
        check(suspended)?;
        let addresses: Vec<usize> = (batch.start()..batch.end()).step_by(page_bytes()).collect();
        let old = look(&addresses)?;
        let elsewhere = |&(_, &answer): &(_, &i32)| answer >= 0 && answer != number;
        let to_move: Vec<usize> =
            addresses.iter().zip(&old).filter(elsewhere).map(|(&address, _)| address).collect();
        left.extend(move_all(&to_move, number)?);
        before.count(&old);
        after.count(&look(&addresses)?);
    }
    Ok(Migrated { before, after, nodes, left, elapsed: begun.elapsed() })
}

/// Of how much one call asks.
const BATCH: usize = 16 << 20;

fn look(addresses: &[usize]) -> Result<Vec<i32>, RearrangeError> {
    let mut answers = vec![0; addresses.len()];
    numa::nodes_of(addresses, &mut answers).map_err(refused)?;
    Ok(answers)
}

/// Those that were to move and did not, with the reason.
fn move_all(to_move: &[usize], node: i32) -> Result<Vec<(usize, i32)>, RearrangeError> {
    if to_move.is_empty() {
        return Ok(Vec::new());
    }
    // Zero or a node where the kernel gives no answer.
    let mut answers = vec![0; to_move.len()];
    match numa::move_to_node(to_move, node, &mut answers) {
        // "No page had to be moved, or none of these could be".
        Ok(()) | Err(Errno(libc::ENOENT)) => {}
        Err(errno) if is_unsupported(errno) => return Err(refused(errno)),
        // Some may have moved before that: those that stayed are looked up.
        Err(Errno(errno)) => answers.fill(-errno),
    }
    let stayed = to_move.iter().zip(answers).zip(look(to_move)?);
    let stayed = stayed.filter(|&(_, now)| now >= 0 && now != node);
    // Where the kernel names no error it was in use.
    let reason = |answer: i32| if answer < 0 { -answer } else { libc::EBUSY };
    Ok(stayed.map(|((&address, answer), _)| (address, reason(answer))).collect())
}

const fn is_unsupported(Errno(errno): Errno) -> bool {
    matches!(errno, libc::ENOSYS | libc::EPERM | libc::EACCES)
}

fn refused(errno: Errno) -> RearrangeError {
    let (unsupported, Errno(errno)) = (is_unsupported(errno), errno);
    if unsupported {
        return RearrangeError::Unsupported { what: "move_pages(2), or forbids it", errno };
    }
    RearrangeError::Os { operation: "move_pages", errno }
}

impl OnNodes {
    /// Counts pages that are somewhere, of those that were taken for absent.
    fn count(&mut self, answers: &[i32]) {
        for node in answers.iter().filter_map(|&answer| u32::try_from(answer).ok()) {
            *self.pages.entry(Node(node)).or_default() += 1;
            self.absent = self.absent.saturating_sub(1);
        }
    }
}

/// The nodes that have memory.
fn nodes() -> Result<Vec<Node>, RearrangeError> {
    let what = "memory nodes (CONFIG_NUMA, or /sys is not mounted)";
    let text = fs::read_to_string("/sys/devices/system/node/has_memory");
    let nodes = text.ok().map(|text| parse(&text)).filter(|nodes| !nodes.is_empty());
    nodes.ok_or(RearrangeError::Unsupported { what, errno: 0 })
}

/// A list such as `0-1,4`; what is none is left out.
fn parse(text: &str) -> Vec<Node> {
    let part = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let ends = first.parse::<u32>().ok().zip(last.parse::<u32>().ok());
        ends.map_or(0..0, |(first, last)| first..last.saturating_add(1))
    };
    text.trim().split(',').flat_map(part).map(Node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn lists_are_understood() {
        assert_eq!(parse("0\n"), [Node(0)]);
        assert_eq!(parse("0-2,5\n"), [Node(0), Node(1), Node(2), Node(5)]);
        assert_eq!(parse(""), []);
        assert_eq!(parse("x,3-y"), []);
    }

    #[test]
    fn answers_are_counted_by_node() {
        let mut counted = OnNodes { absent: 6, ..OnNodes::default() };
        counted.count(&[0, 0, 1, -libc::ENOENT]);
        assert_eq!(counted.pages, BTreeMap::from([(Node(0), 2), (Node(1), 1)]));
        assert_eq!(counted.absent, 3);
    }
}
