//! The documents agree with the code and with each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

/// The checkout.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace is above the crate").to_owned()
}

/// One `step("…")` of the code.
struct Step {
    function: String,
    name: String,
    /// The function that it calls, where it calls just one.
    call: String,
    reason: String,
}

/// The steps of one source file in their order, with the comment that stands above each.
fn steps(source: &str) -> Vec<Step> {
    let mut found = Vec::new();
    let mut function = String::new();
    let mut comment: Vec<&str> = Vec::new();
    for line in source.lines().map(str::trim).take_while(|line| *line != "#[cfg(test)]") {
        if let Some(text) = line.strip_prefix("// ") {
            comment.push(text);
            continue;
        }
        if let Some((_, rest)) = line.split_once("fn ").filter(|(before, _)| before.is_empty() || *before == "pub ") {
            function = rest.split(['(', '<']).next().unwrap_or_default().to_owned();
        }
        if let Some((_, rest)) = line.split_once("step(\"") {
            let name = rest.split('"').next().unwrap_or_default().to_owned();
            let after =
                rest.split_once(',').map(|(_, after)| after.trim().trim_start_matches("|| ")).unwrap_or_default();
            let call = after.chars().take_while(|letter| letter.is_alphanumeric() || "_:".contains(*letter)).collect();
            found.push(Step { function: function.clone(), name, call, reason: comment.join(" ") });
            comment.clear();
        } else if !opens_a_step(line) {
            comment.clear();
        }
    }
    found
}

/// Whether a line may stand between a comment and the step that it is about.
fn opens_a_step(line: &str) -> bool {
    line.starts_with("if !plan.without")
        || line.starts_with("let ") && line.contains("match plan.without")
        || line.contains("=> None,")
}

/// The page of the jail's steps.
fn steps_page() -> String {
    let mut page = String::from(
        "# The jail, step by step\n\n\
         This page is made from the `step(\"…\")` calls in `shim/src/jail`, in their order; a test holds them together. \
         A step that fails ends the start: the run's outcome is `could-not-start`, its exit status is 125, and the \
         message names the step, the object and the kernel call. The reason beside a step is the comment above it in \
         the code. Steps that tests can leave out are left out by no release.\n",
    );
    let mut by_function: BTreeMap<(&str, String), Vec<Step>> = BTreeMap::new();
    for file in ["mod", "bwrap", "init", "exec"] {
        let source = fs::read_to_string(root().join(format!("shim/src/jail/{file}.rs"))).expect("the jail's source");
        for step in steps(&source) {
            by_function.entry((file, step.function.clone())).or_default().push(step);
        }
    }
    for (file, function, title) in [
        ("mod", "outer", "1. The outer process, on the host's side"),
        ("mod", "native", "2. Namespaces and view, by the shim itself"),
        ("bwrap", "launch", "2. Namespaces and view, by bubblewrap"),
        ("mod", "inside", "3. Pid 1 of the jail, once the view is its root"),
        ("init", "run", "4. Pid 1 starts the program"),
        ("exec", "become_program", "5. The program's process, up to its execution"),
    ] {
        let steps = by_function.remove(&(file, function.to_owned())).unwrap_or_default();
        assert!(!steps.is_empty(), "{file}.rs: `{function}` has no steps any more");
        write!(page, "\n## {title}\n\n| step | code | why here |\n|---|---|---|\n").expect("a string takes it");
        for step in steps {
            let call = if step.call.is_empty() { String::new() } else { format!("`{}`", step.call) };
            writeln!(page, "| {} | {call} | {} |", step.name, step.reason.replace('|', "\\|"))
                .expect("a string takes it");
        }
    }
    let left: Vec<_> = by_function.keys().map(|(file, function)| format!("{file}.rs: {function}")).collect();
    assert!(left.is_empty(), "steps in functions that the page does not know: {left:?}");
    page
}

#[test]
fn the_list_of_the_jails_steps_is_the_codes() {
    let made = steps_page();
    let stored = root().join("docs/jail-steps.md");
    if std::env::var_os("TOLLGATE_WRITE_DOCS").is_some() {
        fs::write(&stored, &made).expect("docs/ can be written");
    }
    let stored = fs::read_to_string(stored).expect("docs/jail-steps.md");
    assert_eq!(stored, made, "run this test with TOLLGATE_WRITE_DOCS=1 to write docs/jail-steps.md");
}

#[test]
fn a_step_is_found_with_the_comment_above_it() {
    let source = "fn outer(x: &X) -> R {\n    // First of all.\n    if !plan.without.contains(&Layer::A) {\n        \
                  step(\"a\", || a())?;\n    }\n    // About something else.\n    other();\n    step(\"b\", b)?;\n}\n\
                  #[cfg(test)]\nmod tests { fn t() { step(\"never\", n); } }";
    let found: Vec<_> = steps(source)
        .into_iter()
        .map(|step| format!("{}/{}/{}/{}", step.function, step.name, step.call, step.reason))
        .collect();
    assert_eq!(found, ["outer/a/a/First of all.", "outer/b/b/"]);
}

/// Every Markdown file that is read by people.
fn pages() -> Vec<PathBuf> {
    let mut pages = vec![root().join("README.md")];
    for entry in fs::read_dir(root().join("docs")).expect("docs/") {
        let path = entry.expect("docs/ can be read").path();
        if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
    pages.sort();
    pages
}

/// The text without fenced blocks and inline code, in which a bracket is no link.
fn prose(text: &str) -> String {
    let mut fenced = false;
    let mut prose = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            for outside_code in line.split('`').step_by(2) {
                prose.push_str(outside_code);
                prose.push('`');
            }
            prose.push('\n');
        }
    }
    prose
}

/// The targets of `[text](target)`.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    prose.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target.to_owned()).collect()
}

/// The anchors that a page's headings have: lower case, words joined by hyphens, nothing else kept.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut fenced = false;
    let mut anchors = BTreeSet::new();
    for line in text.lines() {
        if line.starts_with("```") {
            fenced = !fenced;
        }
        let Some(heading) = line.strip_prefix('#').filter(|_| !fenced) else { continue };
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        let kept: String = kept
            .chars()
            .filter_map(|letter| match letter {
                ' ' => Some('-'),
                letter if letter.is_alphanumeric() || matches!(letter, '-' | '_') => Some(letter),
                _ => None,
            })
            .collect();
        anchors.insert(kept);
    }
    anchors
}

#[test]
fn every_link_within_the_repository_leads_somewhere() {
    let mut broken = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page is text");
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match path {
                "" => page.clone(),
                path => page.parent().expect("a page lies in a folder").join(path),
            };
            let there = target.exists()
                && (anchor.is_empty() || fs::read_to_string(&target).is_ok_and(|text| anchors(&text).contains(anchor)));
            if !there {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn every_page_of_the_documents_is_reachable_from_the_readme() {
    let mut seen = BTreeSet::new();
    let mut next = vec![root().join("README.md")];
    while let Some(page) = next.pop() {
        let Ok(page) = page.canonicalize() else { continue };
        if page.extension().is_none_or(|extension| extension != "md") || !seen.insert(page.clone()) {
            continue;
        }
        let text = fs::read_to_string(&page).expect("a page is text");
        let folder = page.parent().expect("a page lies in a folder").to_owned();
        next.extend(links(&text).iter().map(|link| folder.join(link.split('#').next().unwrap_or_default())));
    }
    let lost: Vec<_> =
        pages().into_iter().filter(|page| !seen.contains(&page.canonicalize().expect("listed"))).collect();
    assert!(lost.is_empty(), "no link leads to {lost:?}");
}

/// Paths in backquotes that begin like one of the repository's own.
#[test]
fn every_path_of_the_code_that_a_page_names_exists() {
    let mut missing = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page is text");
        for quoted in text.split('`').skip(1).step_by(2) {
            let ours = ["supervisor/", "shim/", "policies/", "bwrap-profiles/", "tests/", "docs/", "scripts/"]
                .iter()
                .any(|folder| quoted.starts_with(folder));
            let plain = quoted.chars().all(|letter| letter.is_ascii_alphanumeric() || "/._-".contains(letter));
            if ours && plain && !root().join(quoted).exists() {
                missing.push(format!("{}: {quoted}", page.display()));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// The source files of the checkout.
fn sources(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("the checkout can be read") {
        let path = entry.expect("the checkout can be read").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(fs::read_to_string(&path).expect("source is text"));
        }
    }
}

#[test]
fn every_test_that_the_security_model_names_exists() {
    let mut code = Vec::new();
    for folder in ["supervisor", "shim", "tests"] {
        sources(&root().join(folder), &mut code);
    }
    let text = fs::read_to_string(root().join("docs/security-model.md")).expect("docs/security-model.md");
    let named: BTreeSet<&str> = text
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|word| {
            word.matches('_').count() > 2 && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        })
        .collect();
    assert!(named.len() > 20, "the page names tests: {named:?}");
    let missing: Vec<_> =
        named.iter().filter(|name| !code.iter().any(|source| source.contains(&format!("fn {name}(")))).collect();
    assert!(missing.is_empty(), "no such tests: {missing:#?}");
}

#[test]
fn links_in_code_are_no_links() {
    assert_eq!(links("[a](b.md) `[c](d)`\n```\n[e](f)\n```\n[g](h#i)"), ["b.md", "h#i"]);
    assert_eq!(anchors("# A `b`: c\n```\n# no\n```\n## d").into_iter().collect::<Vec<_>>(), ["a-b-c", "d"]);
}
