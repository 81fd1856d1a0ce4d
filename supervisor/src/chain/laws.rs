//! The laws of stacks, over random stacks and effects.

use super::{
    admission::{Admission, Home, Kinds, Layer, Origin, Paths, Rule, Verdict},
    approval::{Approval, Attendance, Desk, Owner},
    quota::{Amounts, Meters, Quota, SharedQuota, Unit},
    stack::{Element, Rank, Stack, Step},
    testing::{admit, wait, FakeWorld, Judge, Recorder},
    Answer, Chain, Decision, Handler,
};
use crate::{
    effect::{tests::any_effect, Effect, Kind, VOCABULARY},
    ledger::{tests::Fixture, Ledger},
};
use proptest::prelude::*;
use std::{
    collections::BTreeSet,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, LazyLock,
    },
};

fn kinds() -> impl Strategy<Value = Vec<Kind>> {
    let all: Vec<Kind> = VOCABULARY.iter().map(|row| row.kind).collect();
    let count = all.len();
    prop::sample::subsequence(all, 0..=count)
}

fn effects() -> impl Strategy<Value = Vec<Effect>> {
    prop::collection::vec(any_effect(), 1..12)
}

/// Guards and answering handlers that are the same ones in every stack, as a room's are in its forks.
static GUARDS: LazyLock<[Step; 2]> = LazyLock::new(|| {
    let refuse = |uid| {
        let judge = move |effect: &Effect| (effect.subject.uid == uid).then(|| Answer::refused("guard", "guarded", ""));
        Step(Arc::new(Judge("guard", judge)))
    };
    [refuse(0), refuse(1)]
});
static ANSWERING: LazyLock<[Step; 2]> = LazyLock::new(|| {
    let answer = |kind| {
        let judge = move |effect: &Effect| {
            let answered =
                Answer { decision: Decision::Answered, decided_by: "answers", ..Answer::done("made up".into(), 0) };
            (effect.kind == kind).then_some(answered)
        };
        Step(Arc::new(Judge("answers", judge)))
    };
    [answer(Kind::FsRead), answer(Kind::FsWrite)]
});

/// Where shared quotas are kept and questions are written down, for all laws together.
static LEDGER: LazyLock<Fixture> = LazyLock::new(Fixture::new);

/// Nobody is there to ask, so an approval refuses what a rule asks about. Two desks, as a run's and its parent's.
static APPROVALS: LazyLock<[Step; 2]> = LazyLock::new(|| {
    let approval = |uid| {
        let owner = Owner { run: LEDGER.run.clone(), uid, workspace: "/w".into() };
        let desk = Desk::new(owner, Attendance::Nobody, LEDGER.ledger.clone(), Arc::new(|_| {}));
        Step(Arc::new(Approval::new(Arc::new(desk))))
    };
    [approval(1000), approval(1001)]
});

/// Allows these kinds and asks about those.
fn asking(allowed: &[Kind], asked: &[Kind]) -> Admission {
    let rule = |verdict, kinds: &[Kind], line| Rule {
        verdict,
        kinds: Kinds::Only(kinds.to_vec()),
        paths: Paths::Any,
        target: Default::default(),
        origin: Origin { file: "test.toml".into(), line, text: "a rule".into() },
    };
    let rules = vec![rule(Verdict::Allow, allowed, 1), rule(Verdict::Ask, asked, 2)];
    Admission::of(Layer::new("test", Home::Builtin, rules))
}

fn shared() -> impl Strategy<Value = Element> {
    let limits = prop::collection::btree_map(units(), 0u64..200, 0..3);
    ("[xy]", limits).prop_map(|(id, limits)| Element::SharedQuota { id, limits })
}

fn approval() -> impl Strategy<Value = Element> {
    (0usize..2).prop_map(|index| Element::Approval(APPROVALS[index].clone()))
}

fn filter() -> impl Strategy<Value = Element> {
    prop_oneof![
        (kinds(), kinds()).prop_map(|(allowed, asked)| Element::Admission(asking(&allowed, &asked))),
        shared(),
        kinds().prop_map(|kinds| Element::Admission(admit(&kinds))),
        ("[ab]", units(), 0u64..200).prop_map(|(id, unit, limit)| Element::Quota { id, unit, limit }),
        (0usize..2).prop_map(|index| Element::Containment(GUARDS[index].clone())),
        (0usize..2).prop_map(|index| Element::Authority(GUARDS[index].clone())),
    ]
}

fn units() -> impl Strategy<Value = Unit> {
    prop::sample::select(Unit::ALL.to_vec())
}

fn answering() -> impl Strategy<Value = Element> {
    (0usize..2).prop_map(|index| Element::Answering(ANSWERING[index].clone()))
}

fn stack() -> impl Strategy<Value = Stack> {
    let element = prop_oneof![6 => filter(), 1 => answering(), 1 => approval(), 1 => Just(Element::Receipts)];
    prop::collection::vec(element, 0..7).prop_map(Stack)
}

/// Limits of the shared quotas themselves; stacks narrow them or do not.
const SHARED: u64 = 120;

/// Runs elements in the order given, whatever their ranks, with meters of their own.
fn chain(elements: &[Element]) -> Chain {
    let meters = Meters::default();
    // The shared quotas' meters outlive a chain, so each chain gets quotas that nobody has used.
    let quotas = fresh_quotas();
    let handler = |element: &Element| -> Arc<dyn Handler> {
        match element {
            // What it writes is tested where it is; here it only has a place.
            Element::Receipts => Arc::new(Judge("receipts", |_: &Effect| None)),
            Element::Admission(admission) => Arc::new(admission.clone()),
            Element::Quota { id, unit, limit } => Arc::new(Quota::new(id.clone(), *unit, *limit, &meters)),
            Element::SharedQuota { id, limits } => {
                Arc::new(SharedQuota::new(format!("{quotas}{id}"), limits.clone(), ledger(), LEDGER.run.clone()))
            }
            Element::Authority(step)
            | Element::Containment(step)
            | Element::Answering(step)
            | Element::Approval(step) => step.0.clone(),
        }
    };
    Chain::new(elements.iter().map(handler).collect())
}

fn ledger() -> Ledger {
    LEDGER.ledger.clone()
}

/// The beginning of the ids of two quotas of which nothing is used.
fn fresh_quotas() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let beginning = format!("{}-", NEXT.fetch_add(1, Ordering::Relaxed));
    let limits: Amounts = Unit::ALL.into_iter().map(|unit| (unit, SHARED)).collect();
    for id in ["x", "y"] {
        LEDGER.ledger.make_quota(&format!("{beginning}{id}"), &limits).expect("a new quota");
    }
    beginning
}

/// What an asker and the world see of effects, one after the other.
fn observe(elements: &[Element], effects: &[Effect]) -> (Vec<Decision>, Vec<Effect>) {
    let (chain, world) = (chain(elements), FakeWorld::default());
    let decisions = wait(async {
        let mut decisions = Vec::new();
        for effect in effects {
            decisions.push(chain.perform(effect, &world).await.decision);
        }
        decisions
    });
    (decisions, world.done.into_inner().unwrap())
}

/// Who decides about an effect.
fn decider(elements: &[Element], effect: &Effect) -> &'static str {
    wait(chain(elements).perform(effect, &FakeWorld::default())).decided_by
}

fn admission(kinds: &[Kind]) -> Element {
    Element::Admission(admit(kinds))
}

proptest! {
    #[test]
    fn two_filters_admit_what_both_do(a in kinds(), b in kinds(), effects in effects()) {
        let mut both: Vec<Kind> = a.iter().filter(|kind| b.contains(kind)).copied().collect();
        // A name may be asked for by whoever may use it in any way.
        if [&a, &b].iter().all(|kinds| kinds.iter().any(|kind| super::admission::is_network(*kind))) {
            both.push(Kind::NetResolve);
        }
        let nested = observe(&[admission(&a), admission(&b)], &effects);
        prop_assert_eq!(&nested, &observe(&[admission(&both)], &effects));
        prop_assert_eq!(&nested, &observe(&[Element::Admission(admit(&a).narrow(&admit(&b)))], &effects));
    }

    #[test]
    fn filters_commute(a in kinds(), b in kinds(), effects in effects()) {
        let one = observe(&[admission(&a), admission(&b)], &effects);
        prop_assert_eq!(one, observe(&[admission(&b), admission(&a)], &effects));
        prop_assert_eq!(admit(&a).narrow(&admit(&b)), admit(&b).narrow(&admit(&a)));
    }

    #[test]
    fn filters_are_idempotent(a in kinds(), effects in effects()) {
        prop_assert_eq!(observe(&[admission(&a), admission(&a)], &effects), observe(&[admission(&a)], &effects));
        prop_assert_eq!(admit(&a).narrow(&admit(&a)), admit(&a));
    }

    #[test]
    fn admitting_everything_is_the_identity(a in kinds(), effects in effects()) {
        let everything = Element::Admission(super::admission::Admission::everything());
        let alone = observe(&[admission(&a)], &effects);
        prop_assert_eq!(&alone, &observe(&[everything.clone(), admission(&a)], &effects));
        prop_assert_eq!(&alone, &observe(&[admission(&a), everything], &effects));
        prop_assert_eq!(super::admission::Admission::everything().narrow(&admit(&a)), admit(&a));
    }

    #[test]
    fn admitting_nothing_admits_nothing(a in kinds(), effects in effects()) {
        let nothing = Element::Admission(super::admission::Admission::nothing());
        let (decisions, done) = observe(&[nothing, admission(&a)], &effects);
        prop_assert!(decisions.iter().all(|decision| *decision == Decision::Refused) && done.is_empty());
    }

    #[test]
    fn normalising_twice_is_normalising_once(stack in stack()) {
        prop_assert_eq!(stack.normalise().normalise(), stack.normalise());
    }

    #[test]
    fn a_normal_form_is_in_order_and_has_one_of_what_is_one(stack in stack()) {
        let normal = stack.normalise().0;
        prop_assert!(normal.is_sorted_by_key(Element::rank));
        for rank in [Rank::Receipts, Rank::Admission] {
            prop_assert!(normal.iter().filter(|element| element.rank() == rank).count() <= 1);
        }
        let ids: Vec<(&str, Option<Unit>)> = normal
            .iter()
            .filter_map(|element| match element {
                Element::Quota { id, unit, .. } => Some((id.as_str(), Some(*unit))),
                Element::SharedQuota { id, .. } => Some((id.as_str(), None)),
                _ => None,
            })
            .collect();
        prop_assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len());
    }

    /// The order in which filters are given cannot be observed. A quota given twice is one quota, so it is left out of
    /// the stacks that are run as they are written.
    #[test]
    fn a_stack_and_its_normal_form_cannot_be_told_apart(
        filters in prop::collection::vec(filter(), 0..6),
        answering in prop::collection::vec(answering(), 0..3),
        approvals in prop::collection::vec(approval(), 0..2),
        effects in effects(),
    ) {
        let mut seen = BTreeSet::new();
        let mut elements: Vec<Element> = filters
            .into_iter()
            .filter(|element| match element {
                Element::Quota { id, unit, .. } => seen.insert((id.clone(), Some(*unit))),
                Element::SharedQuota { id, .. } => seen.insert((id.clone(), None)),
                _ => true,
            })
            .collect();
        elements.extend(answering);
        elements.extend(approvals);
        let normal = Stack(elements.clone()).normalise();
        prop_assert_eq!(observe(&elements, &effects), observe(&normal.0, &effects));
    }

    #[test]
    fn composing_is_associative_and_empty_is_its_identity(a in stack(), b in stack(), c in stack()) {
        prop_assert_eq!(a.compose(&b).compose(&c), a.compose(&b.compose(&c)));
        prop_assert_eq!(a.compose(&Stack::default()), a.normalise());
        prop_assert_eq!(Stack::default().compose(&a), a.normalise());
    }

    #[test]
    fn composing_only_narrows(parent in stack(), child in stack(), effects in effects()) {
        let composed = parent.compose(&child);
        for effect in effects {
            let one = std::slice::from_ref(&effect);
            for outer in [&parent, &child] {
                let (before, reached) = observe(&outer.normalise().0, one);
                let (after, still) = observe(&composed.0, one);
                prop_assert!(reached.len() >= still.len(), "{effect:?} reaches the world only when composed");
                // A question is the innermost step: with a handler that answers in front of it, nobody is asked.
                let asked = decider(&outer.normalise().0, &effect) == "approval";
                let refused = before[0] == Decision::Refused && !asked;
                prop_assert!(!refused || after[0] == Decision::Refused, "{effect:?} is refused only before composing");
            }
        }
    }

    /// What only one of the two limits has, the composed quota has too.
    #[test]
    fn a_composed_shared_quota_has_every_limit_and_the_smaller_of_two(a in shared(), b in shared()) {
        let limits = |stack: &Stack, wanted: &str| -> Vec<Amounts> {
            let of = |element: &Element| match element {
                Element::SharedQuota { id, limits } if id == wanted => Some(limits.clone()),
                _ => None,
            };
            stack.0.iter().filter_map(of).collect()
        };
        let (one, other) = (Stack(vec![a]), Stack(vec![b]));
        let composed = one.compose(&other);
        for id in ["x", "y"] {
            let given: Vec<Amounts> = [limits(&one, id), limits(&other, id)].concat();
            let mut smallest = Amounts::new();
            for (unit, limit) in given.iter().flatten() {
                let least = smallest.get(unit).map_or(*limit, |known| (*known).min(*limit));
                smallest.insert(*unit, least);
            }
            let expected = if given.is_empty() { vec![] } else { vec![smallest] };
            prop_assert_eq!(limits(&composed, id), expected);
        }
    }

    /// What is asked about reaches the world by no order of a stack, where nobody is there to agree.
    #[test]
    fn what_nobody_agrees_to_is_refused_with_and_without_an_approval(
        kinds in kinds(),
        mut elements in prop::collection::vec(filter(), 0..4),
        approvals in prop::collection::vec(approval(), 0..3),
        effects in effects(),
    ) {
        elements.push(Element::Admission(asking(&[], &kinds)));
        elements.extend(approvals);
        // A name is nobody's business but the run's: what is asked about is the connection to it.
        let effects: Vec<Effect> = effects.into_iter().filter(|effect| effect.kind != Kind::NetResolve).collect();
        let (decisions, done) = observe(&Stack(elements).normalise().0, &effects);
        prop_assert!(decisions.iter().all(|decision| *decision == Decision::Refused) && done.is_empty());
    }

    #[test]
    fn a_composed_quota_is_the_smaller_one(a in 0u64..100, b in 0u64..100) {
        let quota = |limit| Element::Quota { id: "run".into(), unit: Unit::WriteBytes, limit };
        let composed = Stack(vec![quota(a)]).compose(&Stack(vec![quota(b)]));
        prop_assert_eq!(composed, Stack(vec![quota(a.min(b))]));
    }
}

/// Answering handlers do not commute, so their order is kept: recording outside faults records them, recording inside
/// records only what went on to the world.
#[test]
fn recording_outside_faults_shows_them_and_inside_does_not() {
    let effects = [Kind::FsRead, Kind::FsWrite].map(crate::effect::tests::sample);
    let log_of = |outside: bool| {
        let recorder = Arc::new(Recorder::default());
        let fault = |effect: &Effect| {
            let injected = Answer { injected: true, ..Answer::failed("no space left on the device", "") };
            (effect.kind == Kind::FsWrite).then_some(injected)
        };
        let mut elements = vec![
            Element::Answering(Step(recorder.clone())),
            Element::Answering(Step(Arc::new(Judge("faults", fault)))),
        ];
        if !outside {
            elements.reverse();
        }
        observe(&Stack(elements).normalise().0, &effects);
        let log = recorder.log.lock().unwrap().clone();
        log
    };
    assert_eq!(log_of(true), [(Kind::FsRead, Decision::Allowed), (Kind::FsWrite, Decision::Failed)]);
    assert_eq!(log_of(false), [(Kind::FsRead, Decision::Allowed)]);
}
