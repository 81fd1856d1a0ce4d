//! What a person said for good: rules that approve a kind of effect on an object.

use super::{writer::Durability, Error, Ledger, Result, Timestamp};
use crate::effect::Kind;
use rusqlite::{params, OptionalExtension as _, Row};
use serde::Serialize;

/// What a saved rule is about. Two effects with the same scope are covered by the same rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Scope {
    /// The kind.
    pub kind: Kind,
    /// The path of the workspace.
    pub path: String,
    /// For a move, where it goes: moving a thing to one place says nothing about another.
    pub to: Option<String>,
    /// The user whose runs it is for.
    pub uid: u32,
    /// The workspace of those runs.
    pub workspace: String,
}

/// A rule that a person saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ApprovalRule {
    /// Its number.
    pub id: i64,
    /// What it is about.
    #[serde(flatten)]
    pub scope: Scope,
    /// The question that it was the answer to.
    pub question: String,
    /// The user who gave it.
    pub by: u32,
    /// When.
    pub made_at: String,
    /// When it was revoked, if it was.
    pub revoked_at: Option<String>,
}

/// Which rules to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhichRules {
    /// Those that hold.
    Held,
    /// Also those that were revoked.
    All,
}

const COLUMNS: &str = "n, kind, path, moved_to, uid, workspace, question, made_by, made_us, revoked_us";

impl Ledger {
    /// Saves a rule, durably; one that is there already is that one. Gives its number.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn save_approval_rule(&self, scope: &Scope, question: &str, by: u32) -> Result<i64> {
        let (scope, question, now) = (scope.clone(), question.to_owned(), self.clock().now());
        self.call(Durability::Power, move |batch| {
            let failed = batch.failed("save an approval rule");
            let found = find(batch.connection(), &scope).map_err(&failed)?;
            if let Some(n) = found {
                return Ok(n);
            }
            let values = params![
                scope.kind.name(),
                scope.path,
                scope.to.as_deref().unwrap_or_default(),
                scope.uid,
                scope.workspace,
                question,
                by,
                now.0
            ];
            batch
                .connection()
                .execute(
                    "INSERT INTO approval_rules (kind, path, moved_to, uid, workspace, question, made_by, made_us) \
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                    values,
                )
                .map_err(failed)?;
            Ok(batch.connection().last_insert_rowid())
        })
    }

    /// The number of the rule that covers this, if one holds.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn find_approval_rule(&self, scope: &Scope) -> Result<Option<i64>> {
        self.read("look for an approval rule", |connection| find(connection, scope).map(Ok))
    }

    /// The saved rules, the oldest first.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn approval_rules(&self, which: WhichRules) -> Result<Vec<ApprovalRule>> {
        let filter = match which {
            WhichRules::Held => "WHERE revoked_us IS NULL",
            WhichRules::All => "",
        };
        self.read("list the approval rules", |connection| {
            let mut statement =
                connection.prepare_cached(&format!("SELECT {COLUMNS} FROM approval_rules {filter} ORDER BY n"))?;
            let rules = statement.query_map([], read)?.collect::<rusqlite::Result<Result<Vec<_>>>>();
            rules
        })
    }

    /// Revokes a rule, durably: the next effect is asked about again.
    ///
    /// # Errors
    ///
    /// [`Error::NoApprovalRule`] when none with this number holds.
    pub fn revoke_approval_rule(&self, n: i64) -> Result<()> {
        let now = self.clock().now();
        self.call(Durability::Power, move |batch| {
            let changed = batch
                .connection()
                .execute(
                    "UPDATE approval_rules SET revoked_us = ?2 WHERE n = ?1 AND revoked_us IS NULL",
                    params![n, now.0],
                )
                .map_err(batch.failed("revoke an approval rule"))?;
            match changed {
                0 => Err(Error::NoApprovalRule(n)),
                _ => Ok(()),
            }
        })
    }
}

fn find(connection: &rusqlite::Connection, scope: &Scope) -> rusqlite::Result<Option<i64>> {
    connection
        .prepare_cached(
            "SELECT n FROM approval_rules WHERE kind = ?1 AND path = ?2 AND moved_to = ?3 AND uid = ?4 \
             AND workspace = ?5 AND revoked_us IS NULL",
        )?
        .query_row(
            params![scope.kind.name(), scope.path, scope.to.as_deref().unwrap_or_default(), scope.uid, scope.workspace],
            |row| row.get(0),
        )
        .optional()
}

fn read(row: &Row<'_>) -> rusqlite::Result<Result<ApprovalRule>> {
    let (id, kind): (i64, String) = (row.get(0)?, row.get(1)?);
    let Ok(kind) = kind.parse::<Kind>() else {
        return Ok(Err(Error::Unreadable { what: format!("approval rule {id}"), found: kind }));
    };
    let to: String = row.get(3)?;
    Ok(Ok(ApprovalRule {
        id,
        scope: Scope {
            kind,
            path: row.get(2)?,
            to: (!to.is_empty()).then_some(to),
            uid: row.get(4)?,
            workspace: row.get(5)?,
        },
        question: row.get(6)?,
        by: row.get(7)?,
        made_at: Timestamp(row.get(8)?).to_string(),
        revoked_at: row.get::<_, Option<i64>>(9)?.map(|us| Timestamp(us).to_string()),
    }))
}
