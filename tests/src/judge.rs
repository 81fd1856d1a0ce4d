//! What a probe program reports, one JSON object a line, and the verdict on it.

use crate::Finished;
use serde_json::Value;
use std::collections::BTreeMap;

/// The attempts of one probe run, by name.
pub struct Attempts {
    found: BTreeMap<String, Value>,
    context: String,
}

/// Reads a probe's report. Lines that are not JSON objects with a `name` fail the test.
#[track_caller]
pub fn attempts(output: &Finished) -> Attempts {
    let mut found = BTreeMap::new();
    for line in output.json_lines() {
        let name = line["name"].as_str().unwrap_or_else(|| panic!("a probe line without a name: {line}")).to_owned();
        assert!(found.insert(name.clone(), line).is_none(), "the probe reported `{name}` twice");
    }
    assert!(found.remove("end").is_some(), "the probe did not reach its end: {output}");
    Attempts { found, context: output.err() }
}

impl Attempts {
    /// Fails unless every attempt failed, and with an error number that is right for its kind.
    ///
    /// `table` gives, for each attempt that the probe must have made, the error names that are right. An attempt that
    /// is not in the table, or a row that was not attempted, fails too: a probe that silently tries less is no proof.
    #[track_caller]
    pub fn all_refused(&self, table: &[(&str, &[&str])]) {
        let mut wrong = Vec::new();
        let mut rows: BTreeMap<&str, &[&str]> = BTreeMap::new();
        for (name, errors) in table {
            assert!(rows.insert(name, errors).is_none(), "`{name}` is in the table twice");
        }
        for (name, attempt) in &self.found {
            match rows.remove(name.as_str()) {
                None => wrong.push(format!("{name}: not in the table: {attempt}")),
                Some(allowed) => match attempt["errno"].as_str() {
                    Some(errno) if allowed.contains(&errno) => {}
                    Some(errno) => {
                        wrong.push(format!("{name}: failed with {errno}, expected one of {allowed:?}: {attempt}"))
                    }
                    None => wrong.push(format!("{name}: SUCCEEDED: {attempt}")),
                },
            }
        }
        wrong.extend(rows.keys().map(|name| format!("{name}: was never attempted")));
        assert!(wrong.is_empty(), "{}\n--- stderr\n{}", wrong.join("\n"), self.context);
    }

    /// The same without these attempts, each of which must have been made.
    #[track_caller]
    pub fn but(&self, names: &[&str]) -> Attempts {
        let mut found = self.found.clone();
        for name in names {
            assert!(found.remove(*name).is_some(), "`{name}` was never attempted; stderr: {}", self.context);
        }
        Attempts { found, context: self.context.clone() }
    }

    /// Fails unless every attempt succeeded.
    #[track_caller]
    pub fn all_succeeded(&self) {
        let wrong: Vec<String> =
            self.found.values().filter(|attempt| attempt["result"] != "ok").map(Value::to_string).collect();
        assert!(wrong.is_empty() && !self.found.is_empty(), "{}\n--- stderr\n{}", wrong.join("\n"), self.context);
    }

    /// One attempt.
    #[track_caller]
    pub fn one(&self, name: &str) -> &Value {
        self.found.get(name).unwrap_or_else(|| panic!("`{name}` was never attempted; stderr: {}", self.context))
    }

    /// Every attempt, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.found.iter()
    }
}
