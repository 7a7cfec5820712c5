//! Programs that are stopped in the middle: job control, and a debugger that holds one thread.

use crate::processes::*;
use crate::registrar_support::alone;
use crate::support::*;
use crate::world::*;
use std::fs;
use std::os::raw::c_int;

/// The numbers of the child's threads of this name.
fn threads_named(process: c_int, name: &str) -> Vec<c_int> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let numbers = tasks.filter_map(|task| task.unwrap().file_name().to_str()?.parse().ok());
    let is_named = |thread: &c_int| {
        let text = fs::read_to_string(format!("/proc/{process}/task/{thread}/comm"));
        text.is_ok_and(|text| text.trim_end() == name)
    };
    numbers.filter(is_named).collect()
}

fn state_of(process: c_int, thread: c_int) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{process}/task/{thread}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Waits until every thread is stopped, or inside a change that waits for the stopped reader: then
/// the process as a whole is not reported as stopped, as documented.
fn until_still(process: c_int) {
    let is_still = |state| matches!(state, Some('T' | 'D' | 'Z' | 'X') | None);
    let all_still = || {
        let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
        let numbers = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok());
        numbers.into_iter().all(|thread| is_still(state_of(process, thread)))
    };
    while !all_still() {
        std::thread::yield_now();
    }
}

#[test]
fn a_program_that_is_stopped_goes_on_where_it_was() {
    alone("stops::a_program_that_is_stopped_goes_on_where_it_was", || {
        if monitor().is_none() {
            return;
        }
        let [read, write] = pipe();
        let child = fork(|| {
            let world = World::leaked().unwrap();
            std::thread::scope(|scope| {
                let changer = scope.spawn(|| (0..150).for_each(|_| world.is_fresh()));
                write_byte(write, b'!');
                (0..150).for_each(|_| world.is_fresh());
                changer.join().unwrap();
            });
        });
        assert_eq!(read_byte(read), Some(b'!'));
        for _ in 0..50 {
            signal(child, libc::SIGSTOP);
            until_still(child);
            signal(child, libc::SIGCONT);
        }
        assert_eq!(wait_for(child), 0);
    });
}

/// While a debugger holds the reader, a change of watched memory waits, and so does a `get`;
/// once it goes on, all threads do, and nothing is stale.
#[test]
fn a_debugger_may_hold_the_reader() {
    alone("stops::a_debugger_may_hold_the_reader", || {
        if monitor().is_none() {
            return;
        }
        let ([ready, say_ready], [go, say_go]) = (pipe(), pipe());
        let child = fork(|| {
            let world = World::leaked().unwrap();
            let at = world.with_memory(b'o');
            write_byte(say_ready, b'!');
            assert_eq!(read_byte(go), Some(b'!'));
            std::thread::scope(|scope| {
                let name = std::thread::Builder::new().name("changer".into());
                let changer = name.spawn_scoped(scope, || map_over(at, PAGES)).unwrap();
                // Asks while the change is under way, and gets whatever is true then.
                scope.spawn(|| world.is_fresh());
                changer.join().unwrap();
                fill(at, PAGES, b'n');
                assert!(world.moves(at, b'n'));
            });
        });
        assert_eq!(read_byte(ready), Some(b'!'));
        let readers = threads_named(child, "pinfold-events");
        readers.iter().copied().for_each(hold);
        write_byte(say_go, b'!');
        // A monitor without a reader lets no thread wait.
        if !readers.is_empty() {
            let waits = |thread: &c_int| state_of(child, *thread) == Some('D');
            while !threads_named(child, "changer").iter().any(waits) {
                std::thread::yield_now();
            }
        }
        readers.iter().copied().for_each(let_go);
        assert_eq!(wait_for(child), 0);
    });
}
