// Two choices above the table of docs/lost.md. Without this script the table is there as a whole.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.lost")) {
    const rows = [...table.tBodies[0].rows];
    const form = document.createElement("p");
    const choices = [0, 1].map((column) => {
      const label = document.createElement("label");
      const select = document.createElement("select");
      select.add(new Option("any", ""));
      for (const name of new Set(rows.map((row) => row.cells[column].textContent)))
        select.add(new Option(name, name));
      label.append(`${table.tHead.rows[0].cells[column].textContent}: `, select);
      form.append(label, " ");
      return select;
    });
    const show = () => {
      for (const row of rows)
        row.hidden = choices.some((one, column) => one.value && row.cells[column].textContent !== one.value);
    };
    form.addEventListener("change", show);
    (table.closest(".md-typeset__scrollwrap") ?? table).before(form);
    choices[1].value = "copies:2";
    show();
  }
});
