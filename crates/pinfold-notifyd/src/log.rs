//! What the operator reads: few lines, however many reasons clients give for one.

use std::fmt;
use std::time::{Duration, Instant};

/// As many lines as are written in each [`PERIOD`].
const LINES: u32 = 20;
const PERIOD: Duration = Duration::from_secs(60);

/// Lines for the operator.
pub(crate) struct Log {
    write: Box<dyn FnMut(fmt::Arguments<'_>) + Send>,
    since: Instant,
    written: u32,
    withheld: u64,
}

impl Log {
    pub(crate) fn new(write: impl FnMut(fmt::Arguments<'_>) + Send + 'static) -> Self {
        Self { write: Box::new(write), since: Instant::now(), written: 0, withheld: 0 }
    }

    /// Writes a line, or counts it.
    pub(crate) fn say(&mut self, line: fmt::Arguments<'_>) {
        self.say_at(Instant::now(), line);
    }

    fn say_at(&mut self, now: Instant, line: fmt::Arguments<'_>) {
        if now.duration_since(self.since) >= PERIOD {
            self.begin_period(now);
        }
        if self.written < LINES {
            self.written += 1;
            (self.write)(line);
        } else {
            self.withheld += 1;
        }
    }

    fn begin_period(&mut self, now: Instant) {
        if self.withheld > 0 {
            (self.write)(format_args!("{} more lines like these withheld", self.withheld));
        }
        (self.since, self.written, self.withheld) = (now, 0, 0);
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").field("withheld", &self.withheld).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn a_flood_is_counted_and_told_in_one_line() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let to = lines.clone();
        let mut log = Log::new(move |line| to.lock().unwrap().push(line.to_string()));
        let begin = log.since;
        (0..1000).for_each(|n| log.say_at(begin, format_args!("line {n}")));
        log.say_at(begin + PERIOD, format_args!("later"));
        let lines = lines.lock().unwrap();
        assert_eq!(lines.len(), 22);
        assert_eq!(lines[20..], ["980 more lines like these withheld", "later"]);
    }
}
