//! Admission: is this effect within what the run's policies allow?

use super::{Answer, BoxFuture, Handler, Next};
use crate::effect::{Effect, Kind};

/// What every policy of a run admits together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    layers: Vec<Layer>,
}

/// One policy's rules.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Layer {
    policy: String,
    rules: Vec<Rule>,
}

/// One rule of a policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    /// What it says about the effects that it matches.
    pub verdict: Verdict,
    /// The kinds that it matches.
    pub kinds: Kinds,
    /// The paths that it matches.
    pub paths: Paths,
    /// Where it is written.
    pub origin: Origin,
}

/// What a rule says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The effect goes on.
    Allow,
}

/// Which kinds a rule matches.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kinds {
    /// These.
    Only(Vec<Kind>),
}

/// Which paths a rule matches.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Paths {
    /// Every path.
    Any,
}

/// Where a rule is written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    /// The file.
    pub file: String,
    /// Its line.
    pub line: usize,
    /// The rule in one line.
    pub text: String,
}

/// Where a policy lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Home {
    /// Inside the program.
    Builtin,
}

impl Layer {
    /// A layer of these rules.
    pub fn new(policy: impl Into<String>, _home: Home, rules: Vec<Rule>) -> Layer {
        Layer { policy: policy.into(), rules }
    }
}

impl Admission {
    /// Admits every effect.
    pub fn everything() -> Admission {
        Admission { layers: Vec::new() }
    }

    /// Admits no effect.
    pub fn nothing() -> Admission {
        Admission::of(Layer::new("nothing", Home::Builtin, Vec::new()))
    }

    /// Admits what this one layer does.
    pub fn of(layer: Layer) -> Admission {
        Admission { layers: vec![layer] }
    }

    /// Admits what both admit.
    pub fn narrow(&self, other: &Admission) -> Admission {
        let mut layers: Vec<Layer> = self.layers.iter().chain(&other.layers).cloned().collect();
        layers.sort();
        layers.dedup();
        Admission { layers }
    }

    fn admits(&self, effect: &Effect) -> bool {
        self.layers.iter().all(|layer| {
            layer.rules.iter().any(|rule| {
                let Kinds::Only(kinds) = &rule.kinds;
                kinds.contains(&effect.kind)
            })
        })
    }
}

impl Handler for Admission {
    fn name(&self) -> &'static str {
        "admission"
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        if self.admits(effect) {
            return next.run(effect);
        }
        Box::pin(async { Answer::refused("admission", "no rule allows it", "") })
    }
}
