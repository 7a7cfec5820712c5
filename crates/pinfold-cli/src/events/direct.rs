//! Pages of a file that reclaim has unmapped, and that are replaced in the file.

use super::trial::{first_wrong, send_until_cached};
use super::{Event, Finding, event};
use crate::change::{DirectFile, Route};
use crate::port::Port;
use crate::races::Stop;
use pinfold::{Access, Change, MappingKind, Monitor};
use std::path::Path;

/// One row.
pub(super) struct Row {
    name: &'static str,
    paged_out: bool,
    replace: fn(&DirectFile) -> Result<(), Stop>,
}

/// Every row.
pub(super) const ALL: [Row; 4] = [
    Row { name: "direct write", paged_out: false, replace: write },
    Row { name: "MADV_PAGEOUT, then a direct write", paged_out: true, replace: write },
    Row { name: "blocks filled with zeros", paged_out: false, replace: zero },
    Row { name: "MADV_PAGEOUT, then blocks filled with zeros", paged_out: true, replace: zero },
];

fn write(file: &DirectFile) -> Result<(), Stop> {
    Ok(file.write(2)?)
}

fn zero(file: &DirectFile) -> Result<(), Stop> {
    Ok(file.zero()?)
}

impl Row {
    pub(super) fn judge(&self, port: &Port, monitor: &dyn Monitor, path: &Path) -> Event {
        let kind = MappingKind::SharedFile;
        let cover = (monitor.coverage(kind, Change::FileHole), Route::Other);
        event(self.name, kind.name(), "send", cover, self.attempt(port, path))
    }

    fn attempt(&self, port: &Port, path: &Path) -> Result<Finding, Stop> {
        let file = DirectFile::open(path)?;
        let mapping = file.mapping();
        port.forget(mapping);
        file.write(1)?;
        let cached = send_until_cached(port, mapping, Access::READ)?;
        if self.paged_out {
            file.page_out()?;
        }
        (self.replace)(&file)?;
        let sent = port.send_with(mapping, 0, Access::READ)?;
        let wrong = file.difference(&sent.bytes);
        Ok(Finding { right: wrong.is_none(), cached, note: wrong.map(first_wrong) })
    }
}
