//! What each handler of the chain costs for one small effect that it forwards, and what the whole chain costs.
//!
//! `cargo bench -p tollgate --features test-switches --bench chain`. The world does nothing here, so a time is that of
//! deciding; `receipts` includes waiting until the ledger has committed the receipt, one effect at a time.
#![allow(missing_docs)] // The macro makes an undocumented public function.

#[allow(dead_code)] // The measurements of the ledger use the rest.
#[path = "../examples/common/mod.rs"]
mod common;

use criterion::{criterion_group, criterion_main, Criterion};
use std::{os::unix::fs::PermissionsExt, sync::Arc};
use tollgate::{
    chain::{
        approval::{Approval, Attendance, Desk, Owner},
        authority::Authority,
        faults::Faults,
        quota::{Meters, Quota, Unit},
        receipts::Receipts,
        stack::{Element, Stack, Step, Wiring},
        Answer, BoxFuture, Chain, Handler, World,
    },
    effect::{fs, Digest, Door, Effect, Kind, Request, Resource, Subject},
    ledger::Ledger,
    policy::{
        search::{PolicyRef, SearchPath},
        Policy,
    },
};

struct Nothing;

impl World for Nothing {
    fn execute<'a>(&'a self, _: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(std::future::ready(Answer::done(serde_json::Value::Null, 5)))
    }
}

fn handlers(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).expect("our own folder");
    let ledger = Ledger::open(folder.path()).expect("a new ledger");
    let run = ledger.new_run_id();
    let subject = Subject { uid: 1000, run: Some(run.clone()), agent: None };
    ledger.insert_run(&common::record(&run)).expect("a run");
    let effect = effect(&subject);
    let meters = Meters::default();
    let search = SearchPath::of_user(None, None);
    let policy = Policy::load(&PolicyRef::parse("python").expect("a name"), &search).expect("a built-in policy");
    let rules = ["fs/write:error=EIO,rate=0,seed=7", "fs/read:error=EIO,rate=0.5,seed=7"];
    let rules = rules.into_iter().map(|rule| rule.parse().expect("a rule")).collect();
    let faults: Arc<dyn Handler> = Arc::new(Faults::new(rules));
    let owner = Owner { run: run.clone(), uid: 1000, workspace: "/w".into() };
    let desk = Desk::new(owner, Attendance::Nobody, ledger.clone(), Arc::new(|_| {}));
    let approval: Arc<dyn Handler> = Arc::new(Approval::new(Arc::new(desk)));
    let one: [(&str, Option<Arc<dyn Handler>>); 7] = [
        ("none", None),
        ("receipts", Some(Arc::new(Receipts::new(ledger.clone(), run.clone())))),
        ("admission", Some(Arc::new(policy.admission.clone()))),
        ("authority", Some(Arc::new(Authority::new(run.clone(), 1000)))),
        ("quota", Some(Arc::new(Quota::new("bench", Unit::Effects, u64::MAX, &meters)))),
        ("faults", Some(faults.clone())),
        ("approval", Some(approval.clone())),
    ];
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let mut group = criterion.benchmark_group("handler");
    for (name, handler) in one {
        let chain = Chain::alone(handler);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let answer = runtime.block_on(chain.perform(&effect, &Nothing));
                assert!(answer.is_success(), "{answer:?}");
            });
        });
    }
    let stack = Stack(vec![
        Element::Admission(policy.admission.clone()),
        Element::Quota { id: "run".into(), unit: Unit::WriteBytes, limit: u64::MAX },
        Element::Answering(Step(faults)),
        Element::Approval(Step(approval)),
    ]);
    let wiring = Wiring { ledger: &ledger, run: &run, owner: 1000, meters: &meters };
    let chain = stack.build(&wiring).expect("a stack with an admission");
    group.bench_function("whole chain", |bencher| {
        bencher.iter(|| {
            let answer = runtime.block_on(chain.perform(&effect, &Nothing));
            assert!(answer.is_success(), "{answer:?}");
        });
    });
    group.finish();
}

/// A small write.
fn effect(subject: &Subject) -> Effect {
    let node = fs::Node::File { digest: Digest::of(b"small"), bytes: 5, mode: 0o644 };
    let path = "src/small.txt".to_owned();
    Effect {
        kind: Kind::FsWrite,
        resource: Resource::Workspace { path: path.clone() },
        subject: subject.clone(),
        room: None,
        door: Door::Api,
        request: Request::Fs(fs::Request::Write { path, node, expect: None }),
    }
}

criterion_group!(benches, handlers);
criterion_main!(benches);
