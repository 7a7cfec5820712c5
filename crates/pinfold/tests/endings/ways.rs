//! The ways for a value to end, and code that a forked child runs.

use crate::registrar_support::in_forked_child;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::mpsc;
use std::thread;

/// A way to end. After its parent is no way: the borrow checker refuses it (`compile_fail` examples in the
/// crates' documentation), or the parent is kept by a count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    Dropped,
    Forgotten,
    InACycle,
    ByAPanic,
    OnAnotherThread,
    InAThreadLocal,
    /// A child has ended its copy; then it is dropped here.
    InAForkedChild,
}

pub(crate) const ENDS: [End; 7] = [
    End::Dropped,
    End::Forgotten,
    End::InACycle,
    End::ByAPanic,
    End::OnAnotherThread,
    End::InAThreadLocal,
    End::InAForkedChild,
];

impl End {
    /// Whether no destructor runs.
    pub(crate) fn leaks(self) -> bool {
        matches!(self, Self::Forgotten | Self::InACycle)
    }
}

/// What refers to itself, and so to what it holds.
struct Node<T> {
    _held: T,
    me: RefCell<Option<Rc<Self>>>,
}

thread_local! {
    static LAST: RefCell<Option<Box<dyn Any>>> = const { RefCell::new(None) };
}

pub(crate) fn end<T: Send + 'static>(it: T, how: End) {
    match how {
        End::Dropped => drop(it),
        End::Forgotten => std::mem::forget(it),
        End::InACycle => {
            let node = Rc::new(Node { _held: it, me: RefCell::new(None) });
            *node.me.borrow_mut() = Some(Rc::clone(&node));
        }
        End::ByAPanic => assert!(panics(|| {
            let _held = it;
            panic!("ends it");
        })),
        End::OnAnotherThread => thread::spawn(move || drop(it)).join().unwrap(),
        End::InAThreadLocal => {
            let (keep, kept) = mpsc::channel();
            let thread = thread::spawn(move || {
                let it: Box<dyn Any> = Box::new(it);
                LAST.with(|last| *last.borrow_mut() = Some(it));
                keep.send(()).unwrap();
            });
            kept.recv().unwrap();
            thread.join().unwrap();
        }
        End::InAForkedChild => in_a_child(it),
    }
}

/// The child drops its copy; this process then its own.
fn in_a_child<T>(it: T) {
    drop(child_does(it, drop));
}

/// A forked child does `work` with its copy, in time and without a panic; this process has its own back.
pub(crate) fn child_does<T>(it: T, work: impl FnOnce(T)) -> T {
    // What other threads of this process are in the midst of stays so in the child: that is what is tested.
    let it = Cell::new(Some(it));
    let to_its_end = in_forked_child(|| {
        work(it.take().unwrap());
        true
    });
    assert!(to_its_end, "the child went on to its end");
    it.into_inner().unwrap()
}

/// Runs `work`, whose panics are expected; whether it panicked.
pub(crate) fn panics(work: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(work)).is_err()
}
