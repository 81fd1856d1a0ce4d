//! What a run may know about itself.

use super::run::Live;
use crate::{
    chain::{
        admission::{Admission, Kinds, Paths, Verdict as RuleVerdict},
        containment::Containment,
        Chain,
    },
    doors::{
        api::{Allowance, Budget, Insight, MountView, Myself, Opinion, RuleView, Verdict},
        control::Controlled,
    },
    effect::{Effect, RunId},
    policy::{limits::Limits, Policy},
};
use std::{collections::BTreeMap, sync::Arc};
use tollgate_shim::protocol::{Access, Mount, Plan};

/// A run's view of itself. Holds no path of the host but those that the jail shows under the same name.
pub struct RunInsight {
    run: RunId,
    policy: String,
    chain: String,
    admission: Arc<Admission>,
    containment: Containment,
    limits: Limits,
    workspace: String,
    mounts: Vec<MountView>,
    live: Arc<Live>,
}

impl RunInsight {
    /// From what the run was made of.
    pub fn new(run: &RunId, policy: &Policy, chain: &Chain, plan: &Plan, live: Arc<Live>) -> RunInsight {
        RunInsight {
            run: run.clone(),
            policy: policy.name.clone(),
            chain: chain.describe(),
            admission: Arc::new(policy.admission.clone()),
            containment: Containment::new(&policy.network),
            limits: policy.limits.clone(),
            workspace: plan.workspace.to_os().to_string_lossy().into_owned(),
            mounts: plan.mounts.iter().filter_map(mount_view).collect(),
            live,
        }
    }

    fn amounts(&self) -> BTreeMap<String, Option<u64>> {
        let micros = |time: Option<std::time::Duration>| time.map(|time| time.as_micros() as u64);
        [
            ("wall_us", micros(self.limits.wall.value())),
            ("cpu_us", micros(self.limits.cpu.value())),
            ("memory_bytes", self.limits.memory.value()),
            ("pids", self.limits.pids.value()),
            ("cpus_milli", self.limits.cpus.value().map(|cpus| (cpus * 1000.0) as u64)),
            ("write_bytes", self.limits.write_bytes.value()),
            ("effects", self.limits.effects.value()),
            ("output_bytes", self.limits.output_bytes.value()),
            ("egress_bytes", self.limits.egress_bytes.value()),
        ]
        .map(|(name, amount)| (name.to_owned(), amount))
        .into()
    }
}

impl Insight for RunInsight {
    fn myself(&self) -> Myself {
        Myself {
            run: self.run.0.clone(),
            room: None,
            policy: self.policy.clone(),
            workspace: self.workspace.clone(),
            chain: self.chain.clone(),
            rules: self.admission.layers().iter().flat_map(|layer| layer.rules()).map(rule_view).collect(),
            mounts: self.mounts.clone(),
            limits: self.amounts(),
            degraded: self.live.record().degraded,
            ask: "`tollgate why KIND PATH` names the rule; the person outside can add to the policy or to the flags \
                  of `tollgate run`"
                .to_owned(),
        }
    }

    fn budget(&self) -> Budget {
        let usage = self.live.usage();
        let used = |name: &str| match name {
            "wall_us" => usage.wall_us,
            "cpu_us" => usage.cpu_us,
            "memory_bytes" => usage.memory_peak,
            "pids" => usage.pids_peak,
            "write_bytes" => usage.write_bytes,
            "effects" => self.live.effects_counted(),
            "output_bytes" => usage.output_bytes,
            _ => 0,
        };
        self.amounts().into_iter().map(|(name, limit)| (name.clone(), Allowance::new(limit, used(&name)))).collect()
    }

    fn opinion(&self, effect: &Effect) -> Opinion {
        Opinion::of(&self.admission, effect).contained(&self.containment, effect)
    }
}

fn rule_view(rule: &crate::chain::admission::Rule) -> RuleView {
    RuleView {
        verdict: match rule.verdict {
            RuleVerdict::Allow => Verdict::Allow,
            RuleVerdict::Ask => Verdict::Ask,
            RuleVerdict::Deny => Verdict::Deny,
        },
        kinds: match &rule.kinds {
            Kinds::Any | Kinds::All => vec!["any".to_owned()],
            Kinds::Only(kinds) => kinds.iter().map(|kind| kind.name().to_owned()).collect(),
        },
        paths: match &rule.paths {
            Paths::Any => Vec::new(),
            Paths::Only(patterns) => patterns.texts().to_vec(),
        },
        network: rule.target.words().iter().map(|(key, words)| format!("{key} {}", words.join(" "))).collect(),
    }
}

fn mount_view(mount: &Mount) -> Option<MountView> {
    let (target, access) = match mount {
        Mount::Bind { target, access: Access::ReadOnly, .. } | Mount::View { target, .. } => (target, "read-only"),
        Mount::Bind { target, access: Access::ReadWrite, .. } | Mount::Overlay { target, .. } => (target, "read-write"),
        Mount::Tmpfs { target, .. } | Mount::Dev { target, .. } | Mount::Proc { target } => (target, "private"),
        Mount::Dir { .. } | Mount::File { .. } | Mount::Symlink { .. } | Mount::Mask { .. } => return None,
    };
    Some(MountView { path: target.to_os().to_string_lossy().into_owned(), access: access.to_owned() })
}
