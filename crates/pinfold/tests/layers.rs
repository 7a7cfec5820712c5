//! Layers look down only: in every crate, and in every folder of a crate, the modules that lie side by side
//! import each other without a circle. Tests inside a file are not looked at, and neither are comments.
//!
//! The graph is made of paths: `use` declarations, and `crate::` and `super::` in the code. A module and the
//! modules inside it count as one for their neighbours.

#![allow(clippy::unwrap_used)] // helpers fail as loudly as tests

mod workspace;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use workspace::{crates, sources};

/// Circles that are there today: the crate, the module they lie in, and which modules take part. A circle may leave
/// this list, none may join it.
const CIRCLES: &[(&str, &str, &[&str])] = &[];

/// A module's path, without `crate`.
type Module = Vec<String>;

/// The modules of one crate, each with its code.
type Code = BTreeMap<Module, String>;

/// Which module imports which, among those that lie in one module.
type Imports = BTreeMap<String, BTreeSet<String>>;

fn module_of(file: &Path, root: &Path) -> Module {
    let inside = file.strip_prefix(root).unwrap().with_extension("");
    let mut module: Module = inside.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
    if module.last().is_some_and(|last| ["lib", "main", "mod"].contains(&last.as_str())) {
        module.pop();
    }
    module
}

/// The code up to its tests, without comments.
fn code_of(text: &str) -> String {
    let lines = text.lines().take_while(|line| !line.trim_start().starts_with("#[cfg(test)]"));
    lines.map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

fn read(root: &Path) -> Code {
    let files = sources(root).into_iter();
    files
        .map(|file| (module_of(&file, root), code_of(&fs::read_to_string(file).unwrap())))
        .collect()
}

fn words(path: &str) -> Vec<String> {
    let path = path.split(" as ").next().unwrap_or("");
    path.split("::").map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// What stands between the braces, cut at the commas that are in no inner braces.
fn branches(inner: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, letter) in inner.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.push(&inner[start..]);
    found
}

/// The paths of a `use` declaration.
fn expand(prefix: &[String], tree: &str) -> Vec<Vec<String>> {
    let Some((base, rest)) = tree.split_once('{') else {
        return vec![[prefix, &words(tree)].concat()];
    };
    let inner = rest.rsplit_once('}').map_or(rest, |(inner, _)| inner);
    let base = [prefix, &words(base)].concat();
    let branches = branches(inner).into_iter().filter(|branch| !branch.trim().is_empty());
    branches.flat_map(|branch| expand(&base, branch)).collect()
}

/// Every path of the code that begins in this crate.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for begin in ["crate", "super", "self"] {
        for (at, _) in code.match_indices(&format!("{begin}::")) {
            let before = code[..at].trim_end();
            if before.ends_with("::")
                || code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
            {
                continue;
            }
            let end = if before.ends_with("use") {
                code[at..].find(';')
            } else {
                code[at..].find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'))
            };
            found.extend(expand(&[], &code[at..end.map_or(code.len(), |end| at + end)]));
        }
    }
    found
}

/// The module that a path of `from` leads to: as deep as there is one.
fn target(from: &Module, path: &[String], code: &Code) -> Module {
    let mut module = from.clone();
    let mut names = path;
    while let Some((first, rest)) = names.split_first() {
        match first.as_str() {
            "crate" => module.clear(),
            "super" => _ = module.pop(),
            "self" => {}
            _ => break,
        }
        names = rest;
    }
    for name in names {
        module.push(name.clone());
        if !code.contains_key(&module) {
            module.pop();
            break;
        }
    }
    module
}

/// For each module, which module inside it imports which.
fn imports(code: &Code) -> BTreeMap<Module, Imports> {
    let mut all: BTreeMap<Module, Imports> = BTreeMap::new();
    for (from, text) in code {
        for path in paths(text) {
            let to = target(from, &path, code);
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            if let (Some(importer), Some(imported)) = (from.get(common), to.get(common)) {
                let inside = all.entry(from[..common].to_vec()).or_default();
                inside.entry(importer.clone()).or_default().insert(imported.clone());
            }
        }
    }
    all
}

/// All that can be reached from a module in one step or more.
fn reached<'a>(from: &str, imports: &'a Imports) -> BTreeSet<&'a str> {
    let (mut found, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        for to in imports.get(module).into_iter().flatten() {
            if found.insert(to.as_str()) {
                next.push(to);
            }
        }
    }
    found
}

/// The circles among these modules, each with those who take part.
fn circles(imports: &Imports) -> BTreeSet<Vec<String>> {
    let reach: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|module| (module.as_str(), reached(module, imports))).collect();
    let circle = |module: &str| {
        let both = |other: &&&str| reach.get(**other).is_some_and(|back| back.contains(module));
        reach[module].iter().filter(both).map(|&other| other.to_owned()).collect::<Vec<_>>()
    };
    imports.keys().map(|module| circle(module)).filter(|circle| circle.len() > 1).collect()
}

#[test]
fn modules_import_each_other_without_circles() {
    let mut found = Vec::new();
    let mut modules = 0;
    for (name, root) in crates() {
        let code = read(&root);
        modules += code.len();
        for (inside, imports) in imports(&code) {
            let circles = circles(&imports).into_iter();
            found.extend(circles.map(|circle| (name.clone(), inside.join("::"), circle)));
        }
    }
    assert!(modules > 100, "the workspace has more modules than {modules}");
    let known = |(name, inside, circle): &(String, String, Vec<String>)| {
        CIRCLES.iter().any(|it| it.0 == name && it.1 == inside && it.2 == circle.as_slice())
    };
    let new: Vec<_> = found.iter().filter(|circle| !known(circle)).collect();
    assert!(new.is_empty(), "these modules import each other: {new:#?}");
    assert_eq!(
        found.len(),
        CIRCLES.len(),
        "circles are gone, so take them off the list; left: {found:#?}"
    );
}

#[test]
fn a_circle_is_found_wherever_its_paths_stand() {
    let code = |files: &[(&str, &str)]| -> Code {
        files.iter().map(|(module, text)| (words(module), code_of(text))).collect()
    };
    let with = |back: &str| {
        let code = code(&[
            ("a", "use crate::{b::{deep, Thing}, c};"),
            ("b", ""),
            ("b::deep", back),
            ("c", "// crate::a is only told of\n#[cfg(test)]\nuse crate::a;"),
        ]);
        circles(&imports(&code)[&Vec::new()])
    };
    let circle = BTreeSet::from([vec!["a".to_owned(), "b".to_owned()]]);
    assert_eq!(with(""), BTreeSet::new());
    assert_eq!(with("use super::Thing;"), BTreeSet::new());
    assert_eq!(with("use super::super::a;"), circle);
    assert_eq!(with("fn f() { crate::a::g() }"), circle);
    assert_eq!(with("pub(crate) use crate::{c, a as other};"), circle);
}
