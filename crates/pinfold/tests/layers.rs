//! Layers look down only: in every crate, and in every folder of a crate, the modules that lie side by side
//! import each other without a circle, and where the documentation of a file has an order of layers (every crate's
//! has), it names each of the modules, and each imports only what stands before it. That is the one place where an
//! order is written. Tests inside a file are not looked at, wherever they stand, and neither are comments.
//!
//! The graph is made of paths: `use` declarations, and `crate::` and `super::` in the code. A path to a name that a
//! module exports for one of its own modules leads there. A module and the modules inside it count as one for their
//! neighbours.

#![allow(clippy::unwrap_used)] // helpers fail as loudly as tests

mod workspace;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use workspace::{crates, sources};

/// What has no order: each file of theirs is included by itself, or is one program.
const NO_ORDER: &[&str] = &["pinfold-models"];

/// A module's path, without `crate`.
type Module = Vec<String>;

/// The modules of one crate, each with its code.
type Code = BTreeMap<Module, String>;

/// The names that modules export for others, and where those stand.
type Exports = BTreeMap<(Module, String), Module>;

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

/// The code without comments, attributes and what is there for tests alone: an item ends where the first line that is
/// indented as far closes it, because the files are formatted.
fn code_of(text: &str) -> String {
    let mut lines = text.lines().map(|line| line.split("//").next().unwrap_or(""));
    let (mut code, mut is_of_tests) = (Vec::new(), false);
    while let Some(line) = lines.next() {
        let is_of_test =
            ["#[cfg(test)]", "#[cfg(all(test,"].iter().any(|it| line.trim_start().starts_with(it));
        if line.trim_start().starts_with("#[") {
            is_of_tests |= is_of_test;
        } else if !is_of_tests {
            code.push(line);
        } else if !line.trim().is_empty() {
            is_of_tests = false;
            if !ends_item(line) {
                _ = lines.find(|it| indent(it) == indent(line) && ends_item(it));
            }
        }
    }
    code.join("\n")
}

/// How far a line is indented.
fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Whether an item may end with this line.
fn ends_item(line: &str) -> bool {
    line.trim_end().ends_with([';', ',', '}'])
}

fn read(root: &Path) -> Code {
    let mut code = Code::new();
    for file in sources(root) {
        // A program and the library of its crate may have one root.
        let text = code.entry(module_of(&file, root)).or_default();
        text.push_str(&code_of(&fs::read_to_string(file).unwrap()));
    }
    code
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

/// What each module exports that is not its own, but of a module inside it or elsewhere in the crate.
fn exports(code: &Code) -> Exports {
    let mut exports = Exports::new();
    for (module, text) in code {
        for (at, _) in text.match_indices("pub") {
            let rest = text[at + 3..].trim_start_matches("(crate)").trim_start_matches("(super)");
            let Some((tree, _)) = rest.strip_prefix(" use ").and_then(|it| it.split_once(';'))
            else {
                continue;
            };
            for path in expand(&[], tree) {
                let inside = [module.as_slice(), &path[..1]].concat();
                let to = target(module, &path, code);
                let to = if code.contains_key(&inside) { inside } else { to };
                if let Some(name) = path.last().filter(|_| to != *module) {
                    exports.insert((module.clone(), name.clone()), to);
                }
            }
        }
    }
    exports
}

/// The module in which what a path of `from` names stands.
fn origin(from: &Module, path: &[String], code: &Code, exports: &Exports) -> Module {
    let mut module = target(from, path, code);
    let next = |module: &Module| {
        path.iter().find_map(|name| exports.get(&(module.clone(), name.clone())).cloned())
    };
    let mut steps = 0..path.len();
    while let Some(to) = steps.next().and_then(|_| next(&module)) {
        module = to;
    }
    module
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
    let exports = exports(code);
    for (from, text) in code {
        for path in paths(text) {
            let to = origin(from, &path, code, &exports);
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
    let mut found: Vec<(String, String, Vec<String>)> = Vec::new();
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
    assert!(found.is_empty(), "these modules import each other: {found:#?}");
}

/// The modules that lie in `inside`.
fn children(code: &Code, inside: &[String]) -> BTreeSet<String> {
    let within = |module: &&Module| module.len() > inside.len() && module.starts_with(inside);
    code.keys().filter(within).map(|module| module[inside.len()].clone()).collect()
}

/// The modules that the documentation at the head of a file names in the order of their layers, if it does: in the
/// paragraph or list that begins with those words.
fn order(text: &str, modules: &BTreeSet<String>) -> Option<Vec<String>> {
    let head = text.lines().map_while(|line| line.strip_prefix("//!")).collect::<Vec<_>>();
    let begin = head.iter().position(|line| line.contains("rder of layers"))?;
    let mut order: Vec<String> = Vec::new();
    for line in head[begin..].iter().take_while(|line| !line.trim().is_empty()) {
        let names = line.split('`').skip(1).step_by(2).filter(|&name| modules.contains(name));
        for name in names {
            if !order.iter().any(|it| it == name) {
                order.push(name.to_owned());
            }
        }
    }
    Some(order)
}

/// What is wrong with an order: modules that it lacks, and imports that look up.
fn faults(order: &[String], modules: &BTreeSet<String>, imports: &Imports) -> Vec<String> {
    let place = |module: &String| order.iter().position(|it| it == module);
    let lacks = modules.iter().filter(|&it| place(it).is_none()).map(|it| format!("lacks {it}"));
    let pairs = imports.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
    let up = pairs.filter(|(from, to)| place(from) < place(to));
    lacks.chain(up.map(|(from, to)| format!("{from} imports {to}"))).collect()
}

#[test]
fn modules_import_only_what_stands_before_them_in_the_order_of_layers() {
    let mut found = Vec::new();
    for (name, root) in crates() {
        let code = read(&root);
        let imports = imports(&code);
        let mut orders = 0;
        for file in sources(&root) {
            let inside = module_of(&file, &root);
            let modules = children(&code, &inside);
            let text = fs::read_to_string(&file).unwrap();
            let Some(order) = order(&text, &modules) else { continue };
            orders += usize::from(inside.is_empty());
            let of_imports = imports.get(&inside).cloned().unwrap_or_default();
            let faults = faults(&order, &modules, &of_imports);
            found.extend(faults.into_iter().map(|fault| (name.clone(), inside.join("::"), fault)));
        }
        if orders == 0 && !NO_ORDER.contains(&name.as_str()) {
            found.push((name, String::new(), "has no order of layers".to_owned()));
        }
    }
    assert!(found.is_empty(), "an order of layers does not hold: {found:#?}");
}

/// The type of an inherent impl block that begins here, if one does.
fn inherent(code: &str) -> Option<&str> {
    let head = code.split('{').next()?.strip_prefix("impl")?;
    if !head.starts_with([' ', '<']) {
        return None;
    }
    let mut depth = 0;
    let end_of_generics = head.char_indices().find(|&(at, letter)| {
        let is_arrow = head[..at].ends_with(['-', '=']);
        depth += i32::from(letter == '<') - i32::from(letter == '>' && !is_arrow);
        depth == 0
    })?;
    let rest = &head[end_of_generics.0..].trim_start_matches('>').trim_start();
    let is_of_trait = rest.split_whitespace().any(|word| word == "for");
    let name = rest.split(|c: char| !(c.is_alphanumeric() || c == '_')).next()?;
    (!is_of_trait && !name.is_empty()).then_some(name)
}

/// The modules with inherent impl blocks of each type, which is named by where it stands.
fn inherent_impls(code: &Code) -> BTreeMap<(Module, String), BTreeSet<Module>> {
    let exports = exports(code);
    let mut all: BTreeMap<_, BTreeSet<Module>> = BTreeMap::new();
    for (module, text) in code {
        let starts = text.match_indices("impl").map(|(at, _)| at);
        for at in starts.filter(|&at| at == 0 || text[..at].ends_with('\n')) {
            let Some(name) = inherent(&text[at..]) else { continue };
            let mut named =
                paths(text).into_iter().filter(|path| path.last().is_some_and(|it| it == name));
            let is_own = ["struct", "enum", "union"].iter().any(|kind| {
                text.match_indices(&format!("{kind} {name}")).any(|(at, found)| {
                    !text[at + found.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_')
                })
            });
            let home = match named.next() {
                Some(path) if !is_own => origin(module, &path, code, &exports),
                _ => module.clone(),
            };
            all.entry((home, name.to_owned())).or_default().insert(module.clone());
        }
    }
    all
}

/// A type whose methods stand in many files is many layers in one.
#[test]
fn no_type_has_inherent_impls_in_more_than_two_files() {
    let mut found = Vec::new();
    for (name, root) in crates() {
        let all = inherent_impls(&read(&root)).into_iter();
        found.extend(all.filter(|(_, files)| files.len() > 2).map(|it| (name.clone(), it)));
    }
    assert!(found.is_empty(), "these types have methods in more than two files: {found:#?}");
}

#[test]
fn inherent_impls_are_told_from_others() {
    assert_eq!(inherent("impl Thing {"), Some("Thing"));
    assert_eq!(inherent("impl<T: Fn() -> Vec<u8>> Thing<T>\nwhere T: Copy {"), Some("Thing"));
    assert_eq!(inherent("impl<'a, T> fmt::Display for Thing<'a, T> {"), None);
    assert_eq!(inherent("implement();"), None);
    let code: Code = [
        ("a", "pub struct Thing;\nimpl Thing {}"),
        ("b", "use crate::a::Thing;\nimpl Thing {}"),
        ("c", "struct Thing;\nimpl Thing {}"),
    ]
    .into_iter()
    .map(|(module, text)| (words(module), code_of(text)))
    .collect();
    let all = inherent_impls(&code);
    let files = |module: &str| all[&(words(module), "Thing".to_owned())].len();
    assert_eq!((all.len(), files("a"), files("c")), (2, 2, 1));
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

#[test]
fn code_behind_tests_counts_and_tests_do_not() {
    let text = "\
a();
#[cfg(test)]
mod tests {
    fn f() {
        b();
    }
}
#[cfg(test)]
use b::{
    b,
    c,
};
#[cfg(all(test, not(loom)))]
mod b;
impl A {
    #[cfg(test)]
    #[must_use]
    fn f<B>(
        b: B,
    ) -> B
    where
        B: Copy,
    {
        b
    }

    d();
}
#[derive(Debug)]
#[cfg(test)] // b
struct B;
e();";
    let code = code_of(text);
    let lines: Vec<_> = code.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert_eq!(lines, ["a();", "impl A {", "d();", "}", "e();"]);
}

#[test]
fn a_circle_through_an_exported_name_is_found() {
    let code: Code =
        [("", "pub use b::{Other, Thing};"), ("a", "use crate::Thing;"), ("b", "use crate::a;")]
            .into_iter()
            .map(|(module, text)| (words(module), code_of(text)))
            .collect();
    let circle = BTreeSet::from([vec!["a".to_owned(), "b".to_owned()]]);
    assert_eq!(circles(&imports(&code)[&Vec::new()]), circle);
}

#[test]
fn an_order_that_does_not_hold_is_found() {
    let names = |names: &[&str]| names.iter().map(|&it| it.to_owned()).collect::<Vec<_>>();
    let modules = BTreeSet::from_iter(names(&["a", "b", "c"]));
    let head =
        "//! A crate.\n//!\n//! The order of layers: `a` (not\n//! `this`), `b`.\n//!\n//! `c`";
    let order = order(head, &modules).unwrap();
    assert_eq!(order, ["a", "b"]);
    let imports =
        |from: &str, to: &str| Imports::from([(from.to_owned(), BTreeSet::from([to.to_owned()]))]);
    assert_eq!(faults(&order, &modules, &imports("b", "a")), ["lacks c"]);
    assert_eq!(faults(&order, &modules, &imports("a", "b")), ["lacks c", "a imports b"]);
}
